package sqlite

import (
	"sync"
	"time"
)

// clock is recorded time as this process knows it: the wall clock, but never behind what was recorded, and going on from
// there at the machine's own pace. A wall clock that is set back stops nothing.
type clock struct {
	wall func() time.Time

	mu   sync.Mutex
	last int64     // recorded, in microseconds
	at   time.Time // when that was seen, with its monotonic reading
}

func (c *clock) nowUS() int64 {
	now := c.wall()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.at.IsZero() {
		return now.UnixMicro()
	}
	return max(now.UnixMicro(), c.last+max(0, now.Sub(c.at).Microseconds()))
}

func (c *clock) saw(recorded int64) {
	now := c.wall()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last, c.at = recorded, now
}

// NowUS is the recorded time that a transaction begun now would have, in microseconds, as far as this process knows.
// What is compared with recorded times is asked for here, not of the wall clock.
func (s *Store) NowUS() int64 {
	if s.writer == nil {
		return time.Now().UnixMicro()
	}
	return s.writer.clock.nowUS()
}

// SteadyUS is the Tx.SteadyUS that a transaction begun now would have.
func (s *Store) SteadyUS() int64 { return s.NowUS() }

// Wall is the wall clock's time, in microseconds, at a steady time, as the two stand to each other now.
func (s *Store) Wall(steadyUS int64) int64 { return steadyUS }
