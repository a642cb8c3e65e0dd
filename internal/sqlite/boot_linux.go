package sqlite

import (
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// bootID names this boot of the machine; "" when it cannot be known.
func bootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// uptime is how long this boot has lasted, time asleep included.
func uptime() time.Duration { return gettime(unix.CLOCK_BOOTTIME) }
