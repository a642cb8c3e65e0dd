package executor

import (
	"context"
	"fmt"
	"math"
	"time"

	"postrider/internal/agent"
	"postrider/internal/sqlite"
)

// ParseTime reads the time that an input is due at, as agents give it too: RFC 3339, from 1970 to 9999. It says what a
// number in its place probably is. The result is in microseconds.
func ParseTime(s string) (us int64, err error) {
	t, err := agent.ParseTime(s)
	if err != nil {
		return 0, err
	}
	return t.UnixMicro(), nil
}

const (
	// clockSet is by how much the wall clock has to depart from steady time before it counts as set, in microseconds.
	clockSet = 500_000
	// retimeBatch is how many timers one transaction looks at.
	retimeBatch = 500
	// seenEvery is how often a node commits something, so that its next process knows until when this one saw time pass.
	// The time after it counts as downtime, and windows count of that a day at most.
	seenEvery = time.Hour
)

// clocks is what the loop knows of the wall clock and of the time that passed.
type clocks struct {
	known  bool
	offset int64 // of the wall clock from steady time, as of the timers' due times
	seenUS int64 // steady time of the last commit for seenEvery
}

// watchClocks has the timers by the wall clock follow it when it was set, and once at start; timers by a duration,
// pauses after errors and expiry go by steady time and know nothing of it. Run calls it before it looks for runs.
func (e *Executor) watchClocks(ctx context.Context) error {
	now := e.store.SteadyUS()
	offset := e.store.Wall(now) - now
	if d := offset - e.clocks.offset; !e.clocks.known || d > clockSet || d < -clockSet {
		since := now
		if !e.clocks.known {
			since = e.store.FoundUS() // what came due while no process lived has not been due for anybody
		}
		moved, err := e.retime(ctx, since)
		if err != nil {
			return fmt.Errorf("set timers by the wall clock: %w", err)
		}
		if e.clocks.known {
			e.log.Warn("the wall clock was set", "by", time.Duration(d)*time.Microsecond, "timers", moved)
		}
		e.clocks.known, e.clocks.offset, e.clocks.seenUS = true, offset, now
	}
	if now-e.clocks.seenUS >= seenEvery.Microseconds() {
		if err := e.store.Write(ctx, func(context.Context, *sqlite.Tx) error { return nil }); err != nil {
			return fmt.Errorf("note that time passes: %w", err)
		}
		e.clocks.seenUS = now
	}
	return nil
}

// retime gives the pending timers by the wall clock that were not due at steady time since their due time by the wall
// clock as it is now, in bounded transactions, and wakes their runs then. It says how many have another one now.
func (e *Executor) retime(ctx context.Context, since int64) (moved int64, err error) {
	for after := int64(0); after < math.MaxInt64; {
		var n int64
		next := after
		err := e.store.Write(ctx, func(ctx context.Context, tx *sqlite.Tx) (err error) {
			n, next, err = retimeSome(ctx, tx, since, after)
			return err
		})
		if err != nil {
			return moved, err
		}
		moved, after = moved+n, next
	}
	return moved, nil
}

// timeOfAt is the steady time of a timer by the wall clock, ?3 and ?4 being what the two are now. One that was due before
// the wall clock got there is due now; one that was due all the time keeps its place.
const timeOfAt = "iif(at_us <= ?4, min(due_us, ?3), ?3 + at_us - ?4)"

// retimeSome does that for the first timers after a row, and says after which row the next are.
func retimeSome(ctx context.Context, tx *sqlite.Tx, since, after int64) (moved, next int64, err error) {
	var last, found int64
	err = tx.Get(ctx, `SELECT COALESCE(max(id), 0), count(*) FROM (SELECT id FROM inbox INDEXED BY inbox_at WHERE id > ? AND at_us IS NOT NULL
		AND consumed_branch IS NULL AND cancelled_branch IS NULL AND ended_us IS NULL ORDER BY id LIMIT ?)`, []any{after, retimeBatch}, &last, &found)
	if err != nil {
		return 0, 0, fmt.Errorf("find timers: %w", err)
	}
	if next = last; found < retimeBatch {
		next = math.MaxInt64
	}
	// What a run has in hand, also during a pause, was due before since.
	moved, _, err = tx.Exec(ctx, `UPDATE inbox INDEXED BY inbox_at SET due_us = `+timeOfAt+` WHERE id > ?1 AND id <= ?2 AND at_us IS NOT NULL
		AND consumed_branch IS NULL AND cancelled_branch IS NULL AND ended_us IS NULL AND due_us > ?5
		AND abs(due_us - `+timeOfAt+`) > 1000`,
		after, last, tx.SteadyUS, tx.WallUS, since)
	if err != nil {
		return 0, 0, fmt.Errorf("set timers: %w", err)
	}
	if moved == 0 {
		return 0, next, nil
	}
	// Runs that wait for a timer; one in a pause after an error has a claim, and goes on waiting.
	_, _, err = tx.Exec(ctx, `UPDATE run SET wake_us = w.due, status = iif(w.due <= ?3, 'ready', 'waiting'), updated_us = ?4
		FROM (SELECT i.run AS run, (SELECT min(p.due_us) FROM inbox p WHERE p.run = i.run
				AND p.consumed_branch IS NULL AND p.cancelled_branch IS NULL AND p.ended_us IS NULL) AS due
			FROM inbox i INDEXED BY inbox_at WHERE i.id > ?1 AND i.id <= ?2 AND i.at_us IS NOT NULL
				AND i.consumed_branch IS NULL AND i.cancelled_branch IS NULL AND i.ended_us IS NULL GROUP BY i.run) w
		WHERE run.id = w.run AND run.status = 'waiting' AND run.claim_step IS NULL AND run.wake_us <> w.due`,
		after, last, tx.SteadyUS, tx.NowUS)
	if err != nil {
		return 0, 0, fmt.Errorf("wake runs of timers: %w", err)
	}
	return moved, next, nil
}
