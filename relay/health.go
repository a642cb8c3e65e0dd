package relay

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"postrider/outbox"
)

// stuckAfter is how long Run, a session's settler or its publisher may go without a turn: Run pauses for half a minute at
// most, and the other two turn all the time.
const stuckAfter = time.Minute

// stamp is when something turned last, without the cost of an allocation: it is set for every record.
type stamp struct{ since atomic.Int64 } // nanoseconds after began; 0: never

var began = time.Now()

func (s *stamp) set() { s.since.Store(int64(time.Since(began))) }

// age is negative if it was never set.
func (s *stamp) age() time.Duration {
	at := s.since.Load()
	if at == 0 {
		return -1
	}
	return time.Since(began) - time.Duration(at)
}

// condition is how Run is doing, for Health.
type condition struct {
	turned    stamp       // Run, or its session's settler
	published stamp       // the session's publisher
	waits     atomic.Bool // for room in the window, which is the settler's business

	mu      sync.Mutex
	session *session // nil: none is connected
	failed  error    // why the last one ended, while none has made progress since; nil: no reason to complain
	own     bool     // and no broker is to blame for that
	since   time.Time
	next    time.Time // when the next one begins
}

// connected notes that a session began; ended that it is over, and why. Progress forgets the failures before, and so does a
// session that had nothing to ship.
func (c *condition) connected(s *session) {
	c.published.set()
	c.waits.Store(false)
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
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	s, failed := r.c.session, r.c.failed
	still := r.c.turned.age()
	if still < 0 {
		return "", errors.New("the relay did not start yet")
	}
	if s != nil && !r.c.waits.Load() {
		still = max(still, r.c.published.age())
	}
	if still > stuckAfter {
		return "", fmt.Errorf("the relay did nothing for %s", still.Round(time.Second))
	}
	if s != nil && (failed == nil || s.acked.Load() || s.bytes.Load() == 0) {
		return "", nil
	}
	if failed == nil {
		return "not connected yet", nil
	}
	if errors.Is(failed, outbox.ErrLocked) {
		return "another relay ships the records of this database: " + failed.Error(), nil
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
