package executor

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"time"

	"postrider/internal/sqlite"
)

// A step that did not commit has not happened, so what a process had in hand when it ended is taken again by the next
// one. One of those steps may be what ended it, and would do so for ever, taking its neighbours along. Therefore:
//
//   - A claim says, in the write that makes it, whether anything else was in hand and which boot of the machine it was.
//   - What is found in hand after an end within the same boot waits for a turn: one step of each run, alone, before
//     anything else is scheduled. After another boot nothing is suspected: the power was cut.
//   - An end counts as a failed attempt of a step only when just that one was in hand and was claimed alone. So the step
//     that ends its process is the only one that comes to --max-attempts; its neighbours commit in their turns.
//   - Turns are no outage: none begins later than Options.Alone after the start, and one that takes longer than that gets
//     company. Those whose last turn is longest ago come first, so that repeated ends come to each of them.
//
// An end in order never counts. One from outside (kill -9, the kernel short of memory) does when a step is alone in hand;
// its next success resets the attempts.

// hand is what a claim says of the moment it was made in.
type hand struct {
	alone bool   // nothing else was in hand in this process
	boot  string // of the machine
}

// hand is that of a claim in a transaction that runs now, by a worker that is among the active ones.
func (e *Executor) hand() hand {
	e.mu.Lock()
	defer e.mu.Unlock()
	return hand{alone: len(e.active) <= 1 && !e.ending.Load(), boot: e.boot}
}

// disclaim says of what is in hand that it is not alone: the process is about to end, and not by it.
func (e *Executor) disclaim(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, e.o.Grace)
	defer cancel()
	err := e.store.Write(ctx, func(ctx context.Context, tx *sqlite.Tx) error {
		_, _, err := tx.Exec(ctx, "UPDATE run SET claim_alone = 0 WHERE status = 'running' AND claim_alone = 1")
		return err
	})
	if err != nil && !errors.Is(err, sqlite.ErrClosed) {
		e.log.Warn("steps in hand may be taken for the cause if the node is killed now", "err", err)
	}
}

// turns is the time after an unclean end in which what was in hand gets its turns. Only Run's goroutine uses it.
type turns struct {
	on    bool
	began time.Time
	ends  time.Time // of the present turn, at the latest
}

// errEnded counts against a step that was alone in hand when its process ended.
var errEnded = errors.New("the node ended while this step was alone in hand")

// recover registers the hosted agents and takes over what a former process had in hand: it finds out whether a step
// ended that process, and has what was in hand wait for its turn alone, or, after another boot, returns it to the queue.
func (e *Executor) recover(ctx context.Context) error {
	var ended *claim
	var v verdict
	var wait int64
	err := e.store.Write(ctx, func(ctx context.Context, tx *sqlite.Tx) (err error) {
		if err := e.register(ctx, tx); err != nil {
			return err
		}
		if ended, err = lastAlone(ctx, tx, e.boot); err != nil {
			return err
		}
		if ended != nil {
			v = e.judge(ended, errEnded)
			if err := failStep(ctx, tx, ended, v); err != nil {
				return err
			}
			if v.status == "waiting" { // not for a time: its turn comes, after all others'
				if _, _, err := tx.Exec(ctx, "UPDATE run SET status = 'running', wake_us = NULL WHERE id = ?", ended.run); err != nil {
					return fmt.Errorf("have run %s wait for its turn: %w", ended.name, err)
				}
			}
		}
		_, _, err = tx.Exec(ctx, `UPDATE run SET status = 'ready', wake_us = ?2, updated_us = ?3
			WHERE status = 'running' AND claim_boot IS NOT ?1`, e.boot, tx.SteadyUS, tx.NowUS)
		if err != nil {
			return fmt.Errorf("return claims of another boot: %w", err)
		}
		// A new number fences who still works under the old one.
		if wait, _, err = tx.Exec(ctx, "UPDATE run SET claim = claim + 1, claim_alone = NULL WHERE status = 'running'"); err != nil {
			return fmt.Errorf("have runs wait for their turns: %w", err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	e.turns = turns{on: wait > 0, began: time.Now()}
	if ended != nil {
		e.m.steps.WithLabelValues(ended.agent, v.status).Inc()
		e.stepLog(ended).Warn("step failed", "err", errEnded, "then", v.status)
		if v.status == "paused" {
			e.o.Notify()
		}
	}
	if wait > 0 {
		e.log.Info("after an unclean end, what was in hand runs one at a time first", "runs", wait)
	}
	return nil
}

// lastAlone is the claim that a former process of this boot had in hand when it ended, if it was the only one and was made
// alone; nil: there is no telling what ended that process.
func lastAlone(ctx context.Context, tx *sqlite.Tx, boot string) (*claim, error) {
	var c claim
	var input sql.NullInt64
	err := tx.Get(ctx, `SELECT r.id, r.tenant, r.name, r.agent, r.claim, r.attempts + 1, r.claim_input,
		b.id, b.head_step + 1, b.head_lsn, b.event_lsn, b.tail_id, b.head_bytes FROM run r JOIN branch b ON b.id = r.live
		WHERE r.status = 'running' AND r.claim_alone = 1 AND r.claim_boot = ?
		AND (SELECT count(*) FROM run WHERE status = 'running' AND claim_alone IS NOT NULL) = 1`, []any{boot},
		&c.run, &c.tenant, &c.name, &c.agent, &c.no, &c.attempt, &input,
		&c.head.Branch, &c.step, &c.head.LSN, &c.head.EventLSN, &c.head.TailID, &c.head.Bytes)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look for what was in hand: %w", err)
	}
	if input.Valid {
		c.input = &claimedInput{row: input.Int64}
	}
	return &c, nil
}

// turnQuery finds whose turn alone it is.
const turnQuery = "SELECT id, agent FROM run WHERE status = 'running' AND claim_alone IS NULL ORDER BY alone_us, id LIMIT 1"

// takeTurn gives the next run its turn when the one before is over, and ends the turns when there is none left or their
// time is. It says when to look again.
func (e *Executor) takeTurn(ctx, steps context.Context, wg *sync.WaitGroup) (time.Duration, error) {
	now := time.Now()
	e.mu.Lock()
	busy := len(e.active) > 0
	e.mu.Unlock()
	if busy && now.Before(e.turns.ends) {
		return min(e.o.Poll, e.turns.ends.Sub(now)), nil
	}
	var run int64
	var name string
	err := e.store.Get(ctx, turnQuery, nil, &run, &name)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return e.o.Poll, fmt.Errorf("find whose turn it is: %w", err)
	}
	left := err == nil
	if left && !busy && now.Sub(e.turns.began) < e.o.Alone {
		p := e.pools[name]
		if p == nil {
			p = &e.unhosted
		}
		e.turns.ends = now.Add(e.o.Alone)
		e.start(steps, run, p, wg)
		return min(e.o.Poll, e.o.Alone), nil
	}
	if left {
		err := e.store.Write(ctx, func(ctx context.Context, tx *sqlite.Tx) error {
			_, _, err := tx.Exec(ctx, "UPDATE run SET status = 'ready', wake_us = ?, updated_us = ? WHERE status = 'running' AND claim_alone IS NULL",
				tx.SteadyUS, tx.NowUS)
			return err
		})
		if err != nil {
			return e.o.Poll, fmt.Errorf("end turns alone: %w", err)
		}
	}
	e.turns.on = false
	e.log.Info("runs go on side by side", "took", now.Sub(e.turns.began))
	return 0, nil
}
