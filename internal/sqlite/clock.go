package sqlite

import (
	"context"
	"crypto/rand"
	"database/sql"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Clocks are what a store takes its times from. Zero fields stand for the machine's own clocks; tests have others.
type Clocks struct {
	Wall   func() time.Time     // may be set to anything at any time
	Uptime func() time.Duration // how long this boot of the machine has lasted, time asleep included; never goes back
	Boot   string               // names the boot that Uptime belongs to
}

func (c Clocks) filled() Clocks {
	if c.Wall == nil {
		c.Wall = time.Now
	}
	if c.Uptime == nil {
		c.Uptime = uptime
	}
	if c.Boot == "" {
		c.Boot = bootID()
	}
	if c.Boot == "" { // unknown: then a process knows of no other's uptime
		c.Boot = "process " + rand.Text()
	}
	return c
}

// read reads both clocks, in microseconds, as of one moment: if the process stood still between the two, it would seem
// that the wall clock was set.
func (c Clocks) read() (wall, up int64) {
	for range 10 {
		before := c.Uptime()
		now := c.Wall()
		after := c.Uptime()
		wall, up = now.UnixMicro(), after.Microseconds()
		if after-before < time.Millisecond {
			break
		}
	}
	return wall, up
}

func gettime(clock int32) time.Duration {
	var t unix.Timespec
	if unix.ClockGettime(clock, &t) != nil {
		return 0 // no such clock: then time passes by the wall clock, between processes
	}
	return time.Duration(t.Nano())
}

// The times of a transaction, from those of the last one in meta; ?1 is the boot, ?2 the wall clock, ?3 the uptime.
//
// Within one boot, steady and recorded time go on by the uptime, which is one and the same to all its processes. Since
// another boot, the wall clock is the only witness of what passed: it counts if it stood at a time that it may have been
// set to, and went forward.
const (
	passed = `CASE WHEN boot = ?1 THEN max(0, ?3 - up_us)
		WHEN wall_us >= 1735689600000000 THEN max(0, ?2 - wall_us) ELSE 0 END` // 2025: this program is younger
	recordedNow = "CASE WHEN boot = ?1 THEN max(?2, clock_us + max(0, ?3 - up_us)) ELSE ?2 END"
	steadyNow   = "steady_us + " + passed

	nextTimes = "UPDATE meta SET commit_seq = commit_seq + 1, clock_us = " + recordedNow + ", steady_us = " + steadyNow + `,
		skip_us = skip_us + max(0, ` + passed + ` - 86400000000), boot = ?1, up_us = ?3, wall_us = ?2
		WHERE id = 1 RETURNING commit_seq, clock_us, steady_us`
	readTimes = "SELECT " + recordedNow + ", " + steadyNow + ", steady_us FROM meta WHERE id = 1"
)

// clock goes on from the times of the last transaction that this process knows of.
type clock struct {
	Clocks
	found int64 // steady time of the last transaction before this process

	mu               sync.Mutex
	recorded, steady int64 // of that transaction
	up               int64 // then
	offset           int64 // of the wall clock from steady time
}

// open takes over from the last transaction in meta.
func (c *clock) open(ctx context.Context, from interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}) error {
	wall, up := c.read()
	var recorded, steady int64
	if err := from.QueryRowContext(ctx, readTimes, c.Boot, wall, up).Scan(&recorded, &steady, &c.found); err != nil {
		return err
	}
	c.saw(recorded, steady, up)
	return nil
}

func (c *clock) saw(recorded, steady, up int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.recorded, c.steady, c.up = recorded, steady, up
}

// now is what a transaction begun now would have.
func (c *clock) now() (recorded, steady, wall int64) {
	wall, up := c.read()
	c.mu.Lock()
	defer c.mu.Unlock()
	since := max(0, up-c.up)
	return max(wall, c.recorded+since), c.steady + since, wall
}

// wallAt keeps to an offset from which the clocks do not depart: what is told again and again should not tremble.
func (c *clock) wallAt(steadyUS int64) int64 {
	_, steady, wall := c.now()
	c.mu.Lock()
	defer c.mu.Unlock()
	if d := wall - steady - c.offset; d < -10_000 || d > 10_000 {
		c.offset += d
	}
	return time.UnixMicro(steadyUS + c.offset).Round(time.Millisecond).UnixMicro()
}

// NowUS is the recorded time that a transaction begun now would have, in microseconds, as far as this process knows.
// What is compared with recorded times is asked for here, not of the wall clock.
func (s *Store) NowUS() int64 {
	recorded, _, _ := s.clock.now()
	return recorded
}

// SteadyUS is the Tx.SteadyUS that a transaction begun now would have.
func (s *Store) SteadyUS() int64 {
	_, steady, _ := s.clock.now()
	return steady
}

// FoundUS is the steady time of the last transaction before this store was opened. What came due later, nobody has seen
// due yet.
func (s *Store) FoundUS() int64 { return s.clock.found }

// Wall is the wall clock's time, in microseconds, at a steady time, as the two stand to each other now: for people, and
// good to a hundredth of a second.
func (s *Store) Wall(steadyUS int64) int64 { return s.clock.wallAt(steadyUS) }
