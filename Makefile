# Thin doors to the CMake presets. `make help` lists them.
SHELL := /bin/bash
JOBS ?= $(shell nproc)
FUZZ_SECONDS ?= 30
SOURCES := $(shell git ls-files -co --exclude-standard '*.cc' '*.h' '*.cu' '*.cuh' 2>/dev/null)

.PHONY: help demo test test-gpu gpu-bundle fuzz mutate dashboards lint format-check format bench container-check page-shot deps test-deps clean

help:
	@echo "make demo    install what is missing, build, run the demo against a server of its own, stop it"
	@echo "make test    install what is missing, build, run every test (presets dev, asan, tsan)"
	@echo "make test-gpu  the tests of the CUDA backend; needs a GPU"
	@echo "make gpu-bundle  puts them into build/gpu, to be copied to a machine with a GPU and started there: build/gpu/run"
	@echo "make fuzz    one fuzzer per request type, FUZZ_SECONDS=30 each (needs clang and libclang-rt-14-dev)"
	@echo "make mutate  shows that the tests notice the mistakes of tests/mutations.txt"
	@echo "make dashboards  draws the Grafana panels of a scripted run into build/dashboards, one PNG a dashboard"
	@echo "make lint    clang-format and clang-tidy over our sources"
	@echo "make bench   CPU kernel table, then steps through the server; writes bench/results/cpu.csv"
	@echo "make build-PRESET, make test-PRESET   with PRESET one of dev, asan, tsan; make build-release has no tests"
	@echo "make container-check  the Dockerfile's steps in bare Debian roots, without Docker, CPU and CUDA (root; 20 minutes)"
	@echo "make page-shot  pictures of the status page into docs/ (needs Chromium)"
	@echo "make deps    install what is missing: the Debian packages of tools/packages.txt, and nvcc into build/cuda"
	@echo "make test-deps  the same, and what only tests need: kubectl, helm and validators into build/deploy-tools"
	@echo "make clean   remove build/"

deps:
	@tools/install_packages
	@tools/install_nvcc

test-deps: deps
	@tools/install_deploy_tools

build-%: deps
	@test -f build/$*/build.ninja || cmake --preset $*
	@cmake --build --preset $* -j $(JOBS)

test-%: test-deps build-%
	@ctest --preset $* -j $(JOBS)

demo: build-release
	@tools/demo.sh

test: test-deps build-dev build-asan build-tsan
	@tools/run_tests dev asan tsan

gpu-bundle: build-gpu-tests
	@tools/gpu_bundle build/gpu-tests build/gpu

test-gpu: gpu-bundle
	@build/gpu/run

# Each request type for FUZZ_SECONDS. Needs clang and its runtime (Debian: clang libclang-rt-14-dev).
fuzz: build-fuzz
	@tools/fuzz build/fuzz $(FUZZ_SECONDS)

dashboards: build-dev
	@/usr/bin/python3 -B tests/deploy/render.py build/dev build/dashboards

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

container-check:
	@tools/container_check

page-shot: build-release
	@tools/page_shot build/release docs

clean:
	rm -rf build
