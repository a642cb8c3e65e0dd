package relay

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// stuckAfter is how long Run may go without a turn: it pauses for half a minute at most, and a session turns all the time.
const stuckAfter = time.Minute

// condition is how Run is doing, for Health.
type condition struct {
	turned atomic.Pointer[time.Time] // nil: Run was not called

	mu      sync.Mutex
	session *session // nil: none is connected
	failed  error    // why the last one ended, while none has made progress since; nil: no reason to complain
	own     bool     // and no broker is to blame for that
	since   time.Time
	next    time.Time // when the next one begins
}

func (c *condition) turn() {
	now := time.Now()
	c.turned.Store(&now)
}

// connected notes that a session began; ended that it is over, and why. Progress forgets the failures before, and so does a
// session that had nothing to ship.
func (c *condition) connected(s *session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.session = s
}

func (c *condition) ended(end ended, own bool, pause time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	if c.failed == nil || end.progress || end.connected && len(end.inFlight) == 0 {
		c.since = now
	}
	c.session, c.failed, c.own, c.next = nil, end.err, own, now.Add(pause)
}

// Health says in one line what keeps records from being shipped, "" if nothing does, and fails when Run itself does not
// go on, or when a session ended for a reason of its own: a lock file that may not be opened, a full disk, a panic. A
// broker that is away is trouble and no failure. It counts what sessions achieve: a connection on which no PUBACK
// comes for what is in flight does not end the trouble that was before it.
func (r *Relay) Health() (trouble string, err error) {
	at := r.c.turned.Load()
	if at == nil {
		return "", errors.New("the relay did not start yet")
	}
	if ago := time.Since(*at); ago > stuckAfter {
		return "", fmt.Errorf("the relay did nothing for %s", ago.Round(time.Second))
	}
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	s, failed := r.c.session, r.c.failed
	if s != nil && (failed == nil || s.acked.Load() || s.bytes.Load() == 0) {
		return "", nil
	}
	if failed == nil {
		return "not connected yet", nil
	}
	why, _, _ := strings.Cut(failed.Error(), "\n") // a panic has its stack behind it
	trouble = fmt.Sprintf("nothing is shipped since %s: %s", r.c.since.UTC().Format(time.RFC3339), cut(why))
	if s != nil {
		return trouble + "; connected again, no PUBACK came yet", nil
	}
	if r.c.own {
		return "", errors.New(trouble)
	}
	return trouble + "; next try " + r.c.next.UTC().Format(time.RFC3339), nil
}
