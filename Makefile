# Two commands: `make run` shows what fovea does, `make test` proves it. Both install what is missing.
JOBS ?= $(shell nproc)
RELEASE := build/release

.PHONY: run test rules parity configure build deps asan-ubsan tsan ci clean

run: configure
	cmake --build --preset release -j $(JOBS) --target fovea_cli
	$(RELEASE)/tools/fovea/fovea run --compare --verify

test: build
	ctest --test-dir $(RELEASE) -LE rules --output-on-failure --no-tests=error -j $(JOBS)

# Changes the rules of attention one line at a time; a test must notice each. Minutes.
rules: configure
	ctest --test-dir $(RELEASE) -L rules --output-on-failure --no-tests=error

configure: deps
	cmake --preset release

build: configure
	cmake --build --preset release -j $(JOBS)

deps:
	bash scripts/install-deps.sh

# Compares live with other implementations, and tests the Python package; needs PyPI.
parity: build
	bash scripts/install-deps.sh python3-venv python3-dev
	bash tests/parity/run.sh $(RELEASE)

asan-ubsan tsan: deps
	cmake --preset $@
	cmake --build --preset $@ -j $(JOBS)
	ctest --preset $@ -j $(JOBS)

ci:
	bash .ci/run

clean:
	rm -rf build
