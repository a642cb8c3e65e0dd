package fold

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// stuckAfter is how long Run may go without a turn: it pauses for half a minute at most, and a session turns once a second
// and after every batch.
const stuckAfter = time.Minute

// condition is how a Subscriber is doing, for Health.
type condition struct {
	turned atomic.Pointer[time.Time] // nil: Run was not called

	mu     sync.Mutex
	up     bool  // subscribed
	failed error // why the last session ended
	since  time.Time
	next   time.Time // when the next one begins
}

func (c *condition) turn() {
	now := time.Now()
	c.turned.Store(&now)
}

func (c *condition) connected() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.up = true
}

// ended notes that a session is over, and why. Progress forgets the failures before.
func (c *condition) ended(err error, progress bool, pause time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	if c.failed == nil || progress || c.up {
		c.since = now
	}
	c.up, c.failed, c.next = false, err, now.Add(pause)
}

// Health says in one line why nothing can arrive, "" if it can, and fails when Run itself does not go on. A broker that is
// away is trouble and no failure.
func (s *Subscriber) Health() (trouble string, err error) {
	at := s.c.turned.Load()
	if at == nil {
		return "", errors.New("the fold did not subscribe yet")
	}
	if ago := time.Since(*at); ago > stuckAfter {
		return "", fmt.Errorf("the fold did nothing for %s", ago.Round(time.Second))
	}
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	switch {
	case s.c.up:
		return "", nil
	case s.c.failed == nil:
		return "not subscribed yet", nil
	}
	why, _, _ := strings.Cut(s.c.failed.Error(), "\n") // a panic has its stack behind it
	return fmt.Sprintf("not subscribed since %s: %s; next try %s", s.c.since.UTC().Format(time.RFC3339), why, s.c.next.UTC().Format(time.RFC3339)), nil
}

// Check fails when the path no longer leads to the database that was opened: what is written goes nowhere then.
func (f *Fold) Check() error { return f.store.Check() }

// Health fails when the database cannot be read or its writer hangs.
func (f *Fold) Health(ctx context.Context) error { return f.store.Health(ctx) }
