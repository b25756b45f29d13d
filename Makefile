# Thin doors to the CMake presets. `make help` lists them.
SHELL := /bin/bash
JOBS ?= $(shell nproc)
SOURCES := $(shell git ls-files -co --exclude-standard '*.cc' '*.h' 2>/dev/null)

.PHONY: help demo test asan lint format bench deps build-% test-% clean

help:
	@echo "make demo    install what is missing, build, run the demo against a server of its own, stop it"
	@echo "make test    install what is missing, build, run every test (dev preset, then asan)"
	@echo "make lint    clang-format and clang-tidy over our sources"
	@echo "make bench   CPU kernel table (release preset)"
	@echo "make build-PRESET, make test-PRESET   with PRESET one of dev, release, asan"
	@echo "make deps    install the Debian packages of tools/packages.txt that are missing"
	@echo "make clean   remove build/"

deps:
	@tools/install_packages

build-%: deps
	@test -f build/$*/build.ninja || cmake --preset $*
	@cmake --build --preset $* -j $(JOBS)

test-%: build-%
	@ctest --preset $* -j $(JOBS)

demo: build-release
	@tools/demo.sh

test: build-dev build-asan
	@tools/run_tests dev asan

lint: build-dev
	@clang-format --dry-run --Werror $(SOURCES)
	@tools/run_clang_tidy build/dev

format:
	@clang-format -i $(SOURCES)

bench: build-release
	@build/release/bench/cpu_verify

clean:
	rm -rf build
