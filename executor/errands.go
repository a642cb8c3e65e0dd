package executor

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"postrider/internal/sqlite"
)

// register notes which agents this process hosts and which routes it has, for every process that takes inputs. Runs that
// waited for either are looked at again.
func (e *Executor) register(ctx context.Context, tx *sqlite.Tx) error {
	if _, _, err := tx.Exec(ctx, "UPDATE meta SET max_record = ? WHERE id = 1", e.o.MaxRecord); err != nil {
		return fmt.Errorf("register limits: %w", err)
	}
	if _, _, err := tx.Exec(ctx, "UPDATE agent SET hosted = 0"); err != nil {
		return fmt.Errorf("register agents: %w", err)
	}
	for name, a := range e.agents {
		_, _, err := tx.Exec(ctx, `INSERT INTO agent (name, kind, hosted, first_us, last_us) VALUES (?1, ?2, 1, ?3, ?3)
			ON CONFLICT (name) DO UPDATE SET kind = ?2, hosted = 1, last_us = ?3`, name, kindOf(a), tx.NowUS)
		if err != nil {
			return fmt.Errorf("register agent %s: %w", name, err)
		}
	}
	if _, _, err := tx.Exec(ctx, "DELETE FROM route"); err != nil {
		return fmt.Errorf("register routes: %w", err)
	}
	for name, r := range e.o.Routes {
		if _, _, err := tx.Exec(ctx, "INSERT INTO route (agent, node, best_effort) VALUES (?, ?, ?)", name, r.Node, r.BestEffort); err != nil {
			return fmt.Errorf("register route of agent %s: %w", name, err)
		}
	}
	_, _, err := tx.Exec(ctx, `UPDATE run SET status = 'ready', wake_us = ?, updated_us = ? WHERE status = 'unhosted'
		AND (agent IN (SELECT name FROM agent WHERE hosted = 1) OR agent IN (SELECT agent FROM route))`, tx.SteadyUS, tx.NowUS)
	if err == nil {
		_, _, err = tx.Exec(ctx, "UPDATE inbox SET next_us = NULL WHERE run IS NULL AND next_us IS NOT NULL AND consumed_branch IS NULL AND cancelled_branch IS NULL AND ended_us IS NULL")
	}
	if err != nil {
		return fmt.Errorf("look for inputs that waited for an agent: %w", err)
	}
	return nil
}

// runErrands does what is due beside the steps, until ctx ends: inputs for elsewhere are passed on, and ids forgotten that
// are older than the window. Neither holds up a step for longer than a short transaction.
func (e *Executor) runErrands(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	var said time.Time
	purged := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-e.errand:
		}
		more, err := e.errands(ctx, &purged)
		if err != nil && ctx.Err() == nil && time.Since(said) > time.Minute {
			said = time.Now()
			e.log.Error("inputs could not be passed on; they wait", "err", err)
		}
		if more {
			timer.Reset(0)
		} else {
			timer.Reset(e.o.Poll)
		}
	}
}

// errands does one round. more asks for another at once.
func (e *Executor) errands(ctx context.Context, purged *time.Time) (more bool, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	more, err = e.passOn(ctx)
	if more || time.Since(*purged) < purgeEvery {
		return more, err
	}
	more, perr := purgeSeen(ctx, e.store, e.o.DedupWindow)
	if !more {
		*purged = time.Now()
	}
	return more && perr == nil, errors.Join(err, perr)
}
