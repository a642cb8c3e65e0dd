//go:build race

package fold

// SQLite in Go is some 20 times slower under the race detector.
const rapidChecks = "15"
