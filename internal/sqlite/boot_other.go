//go:build !linux

package sqlite

// bootID is unknown here: recorded time then never goes back at all.
func bootID() string { return "" }
