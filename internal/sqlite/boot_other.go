//go:build !linux

package sqlite

import (
	"time"

	"golang.org/x/sys/unix"
)

// bootID names this boot of the machine, as macOS does; "" when it cannot be known.
func bootID() string {
	id, err := unix.Sysctl("kern.bootsessionuuid")
	if err != nil {
		return ""
	}
	return id
}

// uptime is how long this boot has lasted, on macOS with the time asleep.
func uptime() time.Duration { return gettime(unix.CLOCK_MONOTONIC) }
