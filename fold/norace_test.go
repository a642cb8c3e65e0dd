//go:build !race

package fold

const rapidChecks = "100"
