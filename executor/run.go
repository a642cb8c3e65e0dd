package executor

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/oklog/ulid/v2"

	"postrider/internal/record"
	"postrider/internal/sqlite"
	"postrider/outbox"
)

func findRun(ctx context.Context, tx *sqlite.Tx, tenant, name string) (id int64, agent, status string, err error) {
	err = tx.Get(ctx, "SELECT id, agent, status FROM run WHERE tenant = ? AND name = ?", []any{tenant, name}, &id, &agent, &status)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		err = fmt.Errorf("look up run %s: %w", name, err)
	}
	return id, agent, status, err
}

// startRun makes the run of its first input, with its root branch, its step 0 (state null) and its first record, postrider.run.started. Gens
// go on where a removed run of that name stopped, so that consumers take the new one for the later.
func startRun(ctx context.Context, tx *sqlite.Tx, a arrival) (id int64, err error) {
	tenant, name, agentName := a.tenant, a.run, a.agent
	var gens int64
	err = tx.Get(ctx, "SELECT gens FROM tombstone WHERE tenant = ? AND name = ?", []any{tenant, name}, &gens)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return 0, fmt.Errorf("start run %s: %w", name, err)
	}
	_, id, err = tx.Exec(ctx, `INSERT INTO run (tenant, name, agent, live, gens, status, created_us, updated_us)
		VALUES (?, ?, ?, 0, ?, 'idle', ?, ?)`, tenant, name, agentName, gens, tx.NowUS, tx.NowUS)
	if err != nil {
		return 0, fmt.Errorf("start run %s: %w", name, err)
	}
	started := record.Record{Kind: record.Event, Type: record.TypeRunStarted, Data: []byte(`{"agent":"` + agentName + `"}`), Occurred: tx.NowUS,
		Correlation: a.root(), Causation: a.id, Trace: a.trace}
	head, err := openBranch(ctx, tx, branchStart{run: id, tenant: tenant}, started)
	if err != nil {
		return 0, fmt.Errorf("start run %s: %w", name, err)
	}
	_, checkpoint, err := tx.Exec(ctx, `INSERT INTO checkpoint (branch, step, next, lsn, event_lsn, bytes, started_us, committed_us, codec, state)
		VALUES (?, 0, 'wait', ?, ?, ?, ?, ?, 1, ?)`, head.Branch, head.LSN, head.EventLSN, head.Bytes, tx.NowUS, tx.NowUS, []byte("null"))
	if err != nil {
		return 0, fmt.Errorf("start run %s: %w", name, err)
	}
	if _, _, err := tx.Exec(ctx, "UPDATE branch SET head_id = ? WHERE id = ?", checkpoint, head.Branch); err != nil {
		return 0, fmt.Errorf("start run %s: %w", name, err)
	}
	return id, nil
}

// branchStart is where a new branch begins; parent 0 makes a root.
type branchStart struct {
	run        int64
	tenant     string
	parent     int64
	step, lsn  int64 // fork
	eventLSN   int64
	checkpoint int64 // the fork step's
	reason     string
}

// openBranch makes a branch with the next gen of its run, appends its first record and makes it live. Only ~node begins
// without one.
func openBranch(ctx context.Context, tx *sqlite.Tx, at branchStart, first ...record.Record) (outbox.Head, error) {
	var epoch, gen int64
	err := tx.Get(ctx, "UPDATE run SET gens = gens + 1 WHERE id = ? RETURNING gens, (SELECT epoch FROM meta WHERE id = 1)", []any{at.run}, &gen, &epoch)
	if err != nil {
		return outbox.Head{}, fmt.Errorf("open branch: %w", err)
	}
	var parent any
	if at.parent != 0 {
		parent = at.parent
	}
	_, id, err := tx.Exec(ctx, `INSERT INTO branch (ulid, run, tenant, gen, epoch, parent, fork_step, fork_lsn, reason, opened_us,
		head_step, head_lsn, event_lsn, head_id, tail_id, head_bytes, exportable, export_bytes, shipped, shipped_bytes, shipped_us, backlog_id)
		VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?7, ?8, ?11, ?12, 0, 0, ?8, 0, ?8, 0, ?10, 0)`,
		ulid.Make().String(), at.run, at.tenant, gen, epoch, parent, at.step, at.lsn, optional(at.reason), tx.NowUS, at.eventLSN, at.checkpoint)
	if err != nil {
		return outbox.Head{}, fmt.Errorf("open branch: %w", err)
	}
	head := outbox.Head{Branch: id, LSN: at.lsn, EventLSN: at.eventLSN}
	if len(first) > 0 {
		if head, err = appendTo(ctx, tx, head, at.step, first); err != nil {
			return outbox.Head{}, err
		}
	}
	if _, _, err := tx.Exec(ctx, "UPDATE run SET live = ? WHERE id = ?", id, at.run); err != nil {
		return outbox.Head{}, fmt.Errorf("open branch: %w", err)
	}
	return head, nil
}

// appendTo appends records at the head of a live branch and moves the branch with them. The step stays.
func appendTo(ctx context.Context, tx *sqlite.Tx, head outbox.Head, step int64, records []record.Record) (outbox.Head, error) {
	next, err := outbox.Append(ctx, tx, head, step, records)
	if err != nil {
		return outbox.Head{}, err
	}
	first := next.TailID - int64(len(records)) + 1
	n, _, err := tx.Exec(ctx, `UPDATE branch SET head_lsn = ?2, event_lsn = ?3, tail_id = ?4, head_bytes = ?5, exportable = ?2, export_bytes = ?5,
		backlog_id = iif(shipped < exportable, backlog_id, ?6) WHERE id = ?1 AND head_lsn = ?7`,
		head.Branch, next.LSN, next.EventLSN, next.TailID, next.Bytes, first, head.LSN)
	if err != nil {
		return outbox.Head{}, fmt.Errorf("move branch head: %w", err)
	}
	if n != 1 {
		return outbox.Head{}, errFenced
	}
	return next, nil
}
