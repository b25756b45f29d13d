# Thin doors to the CMake presets. `make help` lists them.
SHELL := /bin/bash
JOBS ?= $(shell nproc)
FUZZ_SECONDS ?= 30
SOURCES := $(shell git ls-files -co --exclude-standard '*.cc' '*.h' 2>/dev/null)

.PHONY: help demo test fuzz mutate lint format-check format bench deps clean

help:
	@echo "make demo    install what is missing, build, run the demo against a server of its own, stop it"
	@echo "make test    install what is missing, build, run every test (presets dev, asan, tsan)"
	@echo "make fuzz    one fuzzer per request type, FUZZ_SECONDS=30 each (needs clang and libclang-rt-14-dev)"
	@echo "make mutate  shows that the tests notice the mistakes of tests/mutations.txt"
	@echo "make lint    clang-format and clang-tidy over our sources"
	@echo "make bench   CPU kernel table, then steps through the server; writes bench/results/cpu.csv"
	@echo "make build-PRESET, make test-PRESET   with PRESET one of dev, asan, tsan; make build-release has no tests"
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

test: build-dev build-asan build-tsan
	@tools/run_tests dev asan tsan

# Each request type for FUZZ_SECONDS. Needs clang and its runtime (Debian: clang libclang-rt-14-dev).
fuzz: build-fuzz
	@tools/fuzz build/fuzz $(FUZZ_SECONDS)

mutate: deps
	@tools/mutate

format-check: deps
	@clang-format --dry-run --Werror $(SOURCES)

lint: format-check build-dev
	@tools/run_clang_tidy build/dev

format:
	@clang-format -i $(SOURCES)

bench: build-release
	@tools/bench_cpu build/release

clean:
	rm -rf build
