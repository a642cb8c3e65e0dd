package cli

import (
	"strings"
	"testing"
	"time"
)

func TestDueRefusesWhatIsNoTime(t *testing.T) {
	for _, c := range []struct {
		in   time.Duration
		at   string
		want string
	}{
		{0, "1764520000000", `--at: want RFC 3339 such as 2026-01-31T12:00:00Z, not "1764520000000", which looks like the milliseconds from 1970 to 2025-11-30T16:26:40Z`},
		{0, "tomorrow", `--at: want RFC 3339`},
		{0, "1969-12-31T23:59:59Z", "--at: year 1969 is outside 1970 to 9999"},
		{0, "9999-12-31T23:59:59-01:00", "--at: year 10000 is outside 1970 to 9999"},
		{-1, "", "--in: -1ns is negative"},
		{1, "2026-01-31T12:00:00Z", "--in and --at exclude each other"},
	} {
		if _, err := due(c.in, c.at); err == nil || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("in %v, at %q: %v, want %s", c.in, c.at, err, c.want)
		}
	}
	if us, err := due(0, "2026-01-31T12:00:00Z"); err != nil || us != 1769860800000000 {
		t.Errorf("%d, %v", us, err)
	}
}
