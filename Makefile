# Two commands: make demo and make test. Both prepare this machine first (make setup), which is quick from the second
# time on. What they need and use is told in testenv/README.md.

GO      ?= go
# Packages tested at once. Each has servers of its own, so more than two do not help a small machine.
P       ?= 2
# Against hangs. With the race detector the executor's tests take ten minutes on two busy cores.
TIMEOUT ?= 25m
# make test RACE=1 adds the race detector; ARGS goes to go test as it is: make test ARGS='-run Pin -v'.
RACE    ?=
ARGS    ?=
# Every module of the repository with tests.
MODULES := $(patsubst %/go.mod,%,$(filter-out tools/go.mod,$(wildcard go.mod */go.mod */*/go.mod)))
MODULES := $(patsubst go.mod,.,$(MODULES))
TOOL    := $(GO) tool -modfile=$(CURDIR)/tools/go.mod

.PHONY: demo test lint setup fmt clean

demo: setup
	$(GO) run ./cmd/bounceproof demo

test: setup
	@GO='$(GO)' ./scripts/test.sh '$(MODULES)' $(if $(RACE),-race) -p $(P) -timeout $(TIMEOUT) $(ARGS)

lint:
	@GO='$(GO)' ./scripts/lint.sh '$(MODULES)'

setup:
	@$(GO) run ./testenv/cmd/setup

fmt:
	$(TOOL) golangci-lint fmt

# Removes what tests with TESTENV_KEEP=1 have left.
clean:
	$(GO) run ./testenv/cmd/setup -clean
