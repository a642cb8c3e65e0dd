# What is needed: Go, and nothing else for build, test and bench. lint, race and test-faults say below what they add.

GOLANGCI = go run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0

.PHONY: all build test race vet lint bench test-faults ci

all: build test

build: # one static binary
	CGO_ENABLED=0 go build -trimpath -o postrider .

test:
	go test ./...

race: # the race detector needs a C compiler and its headers
	CGO_ENABLED=1 go test -race -shuffle=on -timeout 15m ./...

vet: # the last one is all that is done for macOS
	go vet ./...
	go vet -tags faults ./...
	GOOS=darwin GOARCH=arm64 CGO_ENABLED=0 go vet ./...

lint: # builds the linter on first use
	$(GOLANGCI) run ./...

# One package after the other, so that none disturbs another. A bar that is missed is reported, and no failure.
bench: # the ratios with their bars are listed at the end; mosquitto is measured too where it is installed
	@go test -run '^$$' -bench . -benchmem -p 1 -timeout 10m ./... | awk '{ print } /^ok/ { ok = 1 } /^(--- )?FAIL/ { failed = 1 } \
		/^Benchmark/ { bar = ratio = ""; for (i = 4; i <= NF; i += 2) { if ($$i == "bar") bar = $$(i-1); if ($$i == "ratio") ratio = $$(i-1) } \
			if (bar != "") list[n++] = sprintf("%-40s %6.2f  at least %-4g %s", $$1, ratio, bar, ratio+0 >= bar+0 ? "met" : "NOT MET") } \
		/^Benchmark.*mosquitto/ { mosquitto = 1 } \
		END { print ""; for (i = 0; i < n; i++) print list[i]; if (!mosquitto) print "mosquitto was not measured: it is not installed"; \
			exit failed || !ok }'

# Kills, faulty disks, real brokers. Tests fail where a tool is missing; they never skip. Only those in files with the tag
# run here: the others ran before.
FAULTS = $(shell grep -l --include='*_test.go' -r '^//go:build.*faults' .)

test-faults: # root, strace, python3 with paho-mqtt, mosquitto
	@test -n "$(FAULTS)"
	go test -tags faults -count 1 -timeout 15m -run '^('"$$(sed -n 's/^func \(Test[A-Za-z0-9_]*\).*/\1/p' $(FAULTS) | paste -sd'|' -)"')$$' \
		$(sort $(dir $(FAULTS)))

ci: build vet lint race test-faults
