package executor

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"

	"postrider/internal/agent"
	"postrider/internal/record"
	"postrider/internal/sqlite"
	"postrider/outbox"
)

// errFenced: the claim is no longer the run's. A rewind, a withdrawn input or a later claim came first; the result of
// the step changes nothing.
var errFenced = errors.New("the step is no longer the run's")

// claim is one step in hand: what the agent is given, and what the commit is fenced by.
type claim struct {
	run           int64
	tenant, name  string
	agent         string
	no            int64 // run.claim
	hand                // at the claim; while the step commits, at that of the next one
	branch        string
	step, attempt int64
	state         []byte
	stateID       int64 // the checkpoint that holds these bytes
	headID        int64 // the checkpoint before this step; its branch's if ownHead
	ownHead       bool
	head          outbox.Head
	turn          bool          // after an unclean end, alone
	input         *claimedInput // nil: a step after next: continue
	cause         cause         // of what the step makes: its input, or the last one before it
	continues     int64
	lastError     string
	startedUS     int64
}

// cause is what a record or an input is found by: what it goes back to in the end, what it was made of, and a W3C
// traceparent.
type cause struct{ correlation, causation, trace string }

type claimedInput struct {
	row int64 // inbox.id
	agent.Input
	atUS                            int64
	correlation, causation, traceID string
	hops                            int64
}

// claimStep takes the next step of a run in hand: a continue, or the first due input. No claim is returned when there
// is nothing to do; the run then waits for its next timer, or is idle. hosted says whether its agent is here. A run that
// waits for its turn alone may be claimed at any time: when that is, its caller knows.
func claimStep(ctx context.Context, tx *sqlite.Tx, run int64, hosted func(agent string) bool, h hand) (*claim, error) {
	c := claim{run: run, hand: h}
	var next string
	var codec int64
	var base, checkpointBranch sql.NullInt64
	var state []byte
	err := tx.Get(ctx, `SELECT r.tenant, r.name, r.agent, r.claim + 1, r.attempts + 1, r.continues, COALESCE(r.last_error, ''), r.status = 'running',
		b.id, b.ulid, b.head_step + 1, b.head_lsn, b.event_lsn, b.tail_id, b.head_bytes, b.head_id,
		c.branch, c.next, c.codec, c.base_id, c.state
		FROM run r JOIN branch b ON b.id = r.live JOIN checkpoint c ON c.id = b.head_id
		WHERE r.id = ? AND (r.status IN ('ready', 'waiting') AND r.wake_us <= ? OR r.status = 'running' AND r.claim_alone IS NULL)`,
		[]any{run, tx.SteadyUS}, &c.tenant, &c.name, &c.agent, &c.no, &c.attempt, &c.continues, &c.lastError, &c.turn,
		&c.head.Branch, &c.branch, &c.step, &c.head.LSN, &c.head.EventLSN, &c.head.TailID, &c.head.Bytes, &c.headID,
		&checkpointBranch, &next, &codec, &base, &state)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("claim run %d: %w", run, err)
	}
	if !hosted(c.agent) {
		if gone, err := detach(ctx, tx, run, arrival{tenant: c.tenant, run: c.name, agent: c.agent}); err != nil || gone {
			return nil, err
		}
		_, _, err := tx.Exec(ctx, "UPDATE run SET status = 'unhosted', wake_us = NULL, updated_us = ? WHERE id = ?", tx.NowUS, run)
		return nil, err
	}
	c.ownHead = checkpointBranch.Int64 == c.head.Branch
	c.state, c.stateID = state, c.headID
	if base.Valid {
		c.stateID = base.Int64
		if err := tx.Get(ctx, "SELECT state FROM checkpoint WHERE id = ?", []any{c.stateID}, &c.state); err != nil {
			return nil, fmt.Errorf("load state of run %s: %w", c.name, err)
		}
	}
	if agent.Next(next) == agent.Continue {
		if c.cause, err = lastCause(ctx, tx, c.headID); err != nil {
			return nil, err
		}
	}
	return take(ctx, tx, &c, agent.Next(next))
}

// take records what a run that rests does next: the claim of a step, or until when it goes on resting.
func take(ctx context.Context, tx *sqlite.Tx, c *claim, next agent.Next) (*claim, error) {
	resting, wakeUS, err := follow(ctx, tx, c, next)
	if err != nil {
		return nil, err
	}
	if resting != "" {
		_, _, err := tx.Exec(ctx, `UPDATE run SET status = ?, wake_us = ?, claim_step = NULL, claim_input = NULL, updated_us = ? WHERE id = ?`,
			resting, wakeUS, tx.NowUS, c.run)
		return nil, err
	}
	_, _, err = tx.Exec(ctx, `UPDATE run SET status = 'running', claim = ?, claim_step = ?, claim_input = ?, claim_alone = ?, claim_boot = ?,
		alone_us = iif(?, ?, alone_us), wake_us = NULL, updated_us = ? WHERE id = ?`,
		c.no, c.step, c.inputRow(), c.alone, c.boot, c.turn, tx.SteadyUS, tx.NowUS, c.run)
	if err != nil {
		return nil, fmt.Errorf("claim step %d of %s: %w", c.step, c.name, err)
	}
	return c, nil
}

// follow chooses what a run does after its head step: c's step, which gets its input and its start here, or, with a
// status, no step until wakeUS.
func follow(ctx context.Context, tx *sqlite.Tx, c *claim, next agent.Next) (resting string, wakeUS any, err error) {
	c.input, c.startedUS = nil, tx.NowUS
	if next == agent.Continue {
		return "", nil, nil // for the same cause
	}
	in, due, err := nextInput(ctx, tx, c.run)
	switch {
	case err != nil:
		return "", nil, err
	case in != nil:
		c.input, c.cause = in, cause{cmp.Or(in.correlation, in.ID), in.ID, in.traceID}
		return "", nil, nil
	case due != 0:
		return "waiting", due, nil
	}
	return "idle", nil, nil
}

// lastCause is that of the last step with an input, from a checkpoint down its branch.
func lastCause(ctx context.Context, tx *sqlite.Tx, checkpoint int64) (c cause, err error) {
	err = tx.Get(ctx, `WITH RECURSIVE walk (prev_id, input) AS (SELECT prev_id, input FROM checkpoint WHERE id = ?
		UNION ALL SELECT c.prev_id, c.input FROM walk w JOIN checkpoint c ON c.id = w.prev_id WHERE w.input IS NULL)
		SELECT COALESCE(i.correlation, i.input_id), i.input_id, COALESCE(i.trace, '') FROM walk w JOIN inbox i ON i.id = w.input`,
		[]any{checkpoint}, &c.correlation, &c.causation, &c.trace)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return cause{}, fmt.Errorf("find what a step goes back to: %w", err)
	}
	return c, nil
}

// inputRow is the inbox row of the step's input, or NULL.
func (c *claim) inputRow() any {
	if c.input == nil {
		return nil
	}
	return c.input.row
}

// nextInput is the first due input of a run, by max(arrival, due), then arrival. When none is due, it says when. Those
// that expired before their step are dead letters.
func nextInput(ctx context.Context, tx *sqlite.Tx, run int64) (*claimedInput, int64, error) {
	for {
		in := claimedInput{}
		var due, expires int64
		var data []byte
		err := tx.Get(ctx, `SELECT id, due_us, COALESCE(expires_us, 0), input_id, type, data, source, arrived_us, COALESCE(correlation, ''),
			COALESCE(causation, ''), COALESCE(trace, ''), hops FROM inbox
			WHERE run = ? AND consumed_branch IS NULL AND cancelled_branch IS NULL AND ended_us IS NULL ORDER BY due_us, id LIMIT 1`, []any{run},
			&in.row, &due, &expires, &in.ID, &in.Type, &data, &in.Source, &in.atUS, &in.correlation, &in.causation, &in.traceID, &in.hops)
		if errors.Is(err, sql.ErrNoRows) {
			return nil, 0, nil
		}
		if err != nil {
			return nil, 0, fmt.Errorf("find next input: %w", err)
		}
		if due > tx.SteadyUS {
			return nil, due, nil
		}
		if expires == 0 || expires > tx.SteadyUS {
			in.Data = data
			return &in, 0, nil
		}
		_, _, err = tx.Exec(ctx, "UPDATE inbox SET ended_us = ?, outcome = 'dead', reason = 'expired before its step' WHERE id = ?", tx.NowUS, in.row)
		if err != nil {
			return nil, 0, fmt.Errorf("set expired input aside: %w", err)
		}
	}
}

// commitStep is the step: in one transaction it consumes the input, stores the new state, hands local commands to their
// runs, appends the records, moves the branch head and claims the next step (unless yield). Each guard is in a write's
// WHERE; a step whose claim, branch, head or input is no longer the run's changes nothing: errFenced.
func commitStep(ctx context.Context, tx *sqlite.Tx, c *claim, e *effects, yield bool, maxContinue int64) (next *claim, err error) {
	if c.input != nil {
		n, _, err := tx.Exec(ctx, `UPDATE inbox SET consumed_branch = ?, consumed_step = ?, next_us = NULL
			WHERE id = ? AND run = ? AND consumed_branch IS NULL AND cancelled_branch IS NULL AND ended_us IS NULL`,
			c.head.Branch, c.step, c.input.row, c.run)
		if err != nil {
			return nil, fmt.Errorf("consume input: %w", err)
		}
		if n != 1 {
			return nil, errFenced
		}
	}
	if err := cancelCommands(ctx, tx, c, e.cancel); err != nil {
		return nil, err
	}
	records := slices.Clip(e.records) // the unit may run again
	for _, a := range e.local {
		switch {
		case a.routed:
			records, err = deliverRouted(ctx, tx, a, records, e.occurred)
		case a.tenant == c.tenant && a.run == c.name && (e.next == agent.Done || e.next == agent.Fail):
			err = deadLetter(ctx, tx, a, "the run ended with the step that sent it")
		default:
			err = deliverLocal(ctx, tx, a)
		}
		if err != nil {
			return nil, err
		}
	}
	head, err := outbox.Append(ctx, tx, c.head, c.step, records)
	if err != nil {
		return nil, err
	}
	var prev, base, state any
	if c.ownHead {
		prev = c.headID
	}
	codec := 1
	if e.state == nil {
		codec, base = 0, c.stateID
	} else {
		state = e.state
	}
	_, checkpoint, err := tx.Exec(ctx, `INSERT INTO checkpoint (branch, step, prev_id, next, input, lsn, event_lsn, bytes, started_us, committed_us, codec, base_id, state)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
		c.head.Branch, c.step, prev, string(e.next), c.inputRow(), head.LSN, head.EventLSN, head.Bytes, c.startedUS, tx.NowUS, codec, base, state)
	if err != nil {
		return nil, fmt.Errorf("store checkpoint: %w", err)
	}
	first := head.TailID - int64(len(records)) + 1
	n, _, err := tx.Exec(ctx, `UPDATE branch SET head_step = ?2, head_lsn = ?3, event_lsn = ?4, head_id = ?5, tail_id = ?6, head_bytes = ?7,
		exportable = ?3, export_bytes = ?7, backlog_id = iif(shipped < exportable, backlog_id, ?8)
		WHERE id = ?1 AND head_step = ?2 - 1 AND head_lsn = ?9`,
		c.head.Branch, c.step, head.LSN, head.EventLSN, checkpoint, head.TailID, head.Bytes, first, c.head.LSN)
	if err != nil {
		return nil, fmt.Errorf("move branch head: %w", err)
	}
	if n != 1 {
		return nil, errFenced
	}
	continues := int64(0)
	if e.next == agent.Continue {
		continues = c.continues + 1
	}
	after := &claim{run: c.run, tenant: c.tenant, name: c.name, agent: c.agent, no: c.no + 1, hand: c.hand, branch: c.branch, step: c.step + 1, attempt: 1,
		state: c.state, stateID: c.stateID, headID: checkpoint, ownHead: true, head: head, continues: continues, cause: c.cause}
	if e.state != nil {
		after.state, after.stateID = e.state, checkpoint
	}
	var resting string
	var wakeUS any
	switch {
	case e.next == agent.Done:
		resting = "done"
	case e.next == agent.Fail:
		resting = "failed"
	case e.next == agent.Continue && continues >= maxContinue:
		resting = "paused"
	case yield:
		resting, wakeUS = "ready", tx.SteadyUS
	default:
		if resting, wakeUS, err = follow(ctx, tx, after, e.next); err != nil {
			return nil, err
		}
	}
	// One write ends the claim and records what follows. The guard is here, so that a fenced claim ends in this statement.
	const guard = " WHERE id = ? AND live = ? AND claim = ? AND status = 'running'"
	if resting == "" {
		// Status, wake_us and claim_boot stay as they are for a run in hand: if they were named, SQLite would write its index entries anew.
		n, _, err = tx.Exec(ctx, "UPDATE run SET claim = claim + 1, claim_step = ?, claim_input = ?, claim_alone = ?, attempts = 0, continues = ?, last_error = NULL, updated_us = ?"+guard,
			after.step, after.inputRow(), after.alone, continues, tx.NowUS, c.run, c.head.Branch, c.no)
	} else {
		n, _, err = tx.Exec(ctx, `UPDATE run SET status = ?, wake_us = ?, claim = claim + 1, claim_step = NULL, claim_input = NULL, attempts = 0, continues = ?,
			last_error = NULL, updated_us = ?`+guard, resting, wakeUS, continues, tx.NowUS, c.run, c.head.Branch, c.no)
	}
	switch {
	case err != nil:
		return nil, fmt.Errorf("release claim: %w", err)
	case n != 1:
		return nil, errFenced
	case resting == "":
		return after, nil
	case resting == "paused":
		return nil, pause(ctx, tx, c, head, c.step, fmt.Sprintf("%d steps in a row without input", continues), "")
	}
	return nil, nil
}

// deliverLocal hands a command to a run of this node within the sender's step. What its run cannot take is a dead letter
// of the receiver; the sender's step commits all the same.
func deliverLocal(ctx context.Context, tx *sqlite.Tx, a arrival) error {
	_, _, err := enqueue(ctx, tx, a)
	if errors.Is(err, ErrConflict) {
		return deadLetter(ctx, tx, a, err.Error())
	}
	return err
}

// deliverRouted has a command for an agent that is not hosted here leave with the sender's step: as one more record of it,
// where a plain route takes it; else it waits in the inbox, until it is due, or for the best-effort route, or, when its run
// has steps here, for its agent.
func deliverRouted(ctx context.Context, tx *sqlite.Tx, a arrival, records []record.Record, occurred int64) ([]record.Record, error) {
	to, err := placeOf(ctx, tx, a)
	if err == nil && !to.here() && !to.bestEffort && a.due(tx) <= tx.SteadyUS {
		behind, err := straysBefore(ctx, tx, a)
		if err != nil {
			return nil, err
		}
		if !behind {
			return leaveAtOnce(ctx, tx, a, to, records, occurred)
		}
	}
	if err == nil {
		_, _, err = accept(ctx, tx, a)
	}
	if errors.Is(err, ErrConflict) || errors.Is(err, ErrNotFound) || errors.Is(err, ErrInvalid) {
		err = deadLetter(ctx, tx, a, err.Error())
	}
	return records, err
}

// leaveAtOnce is deliverRouted for a command that nothing holds up. Its id may have been used while its agent was here.
func leaveAtOnce(ctx context.Context, tx *sqlite.Tx, a arrival, to place, records []record.Record, occurred int64) ([]record.Record, error) {
	fresh, err := lookUp(ctx, tx, a)
	switch {
	case errors.Is(err, ErrConflict):
		return records, deadLetter(ctx, tx, a, err.Error())
	case err != nil || !fresh:
		return records, err
	}
	return append(records, command(a, to.node, occurred)), nil
}

// cancelCommands withdraws the run's own commands by the ids it gave them, where they are still pending here. Their ids
// are free again: a timer may be set anew, also in the same step.
func cancelCommands(ctx context.Context, tx *sqlite.Tx, c *claim, ids []string) error {
	for _, id := range ids {
		list, err := trace(ctx, tx, `UPDATE inbox SET cancelled_branch = ?, cancelled_step = ?
			WHERE command_id = ? AND created_branch IN (SELECT id FROM branch WHERE run = ?)
			AND consumed_branch IS NULL AND cancelled_branch IS NULL AND ended_us IS NULL RETURNING id, COALESCE(run, 0), due_us, 0, 0`,
			c.head.Branch, c.step, id, c.run)
		if err != nil {
			return fmt.Errorf("cancel command %s: %w", id, err)
		}
		for _, in := range list {
			if err := letGo(ctx, tx, in.run, in.id); err != nil {
				return err
			}
			if err := forget(ctx, tx, in.id); err != nil {
				return err
			}
		}
	}
	return nil
}

// letGo frees a run from an input that was just withdrawn: the step in hand that was to consume it is fenced, a pause
// after an error ends, and a run that was paused at it goes on and says so.
func letGo(ctx context.Context, tx *sqlite.Tx, run, input int64) error {
	var status string
	var step int64
	var head outbox.Head
	err := tx.Get(ctx, `SELECT r.status, b.head_step, b.id, b.head_lsn, b.event_lsn, b.tail_id, b.head_bytes FROM run r JOIN branch b ON b.id = r.live
		WHERE r.id = ? AND r.claim_input = ?`, []any{run, input}, &status, &step, &head.Branch, &head.LSN, &head.EventLSN, &head.TailID, &head.Bytes)
	if errors.Is(err, sql.ErrNoRows) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("free run from input: %w", err)
	}
	if status == "paused" {
		resumed := record.Record{Kind: record.Event, Type: record.TypeRunResumed, Data: appendReason(nil, "its input was withdrawn"), Occurred: tx.NowUS}
		if _, err := appendTo(ctx, tx, head, step, []record.Record{resumed}); err != nil {
			return err
		}
	}
	_, _, err = tx.Exec(ctx, `UPDATE run SET status = 'ready', wake_us = ?, claim = claim + 1, claim_step = NULL, claim_input = NULL, attempts = 0,
		last_error = NULL, updated_us = ? WHERE id = ?`, tx.SteadyUS, tx.NowUS, run)
	if err == nil && status == "running" { // its agent is told to stop: see Executor.fence
		_, _, err = tx.Exec(ctx, "UPDATE meta SET rewinds = rewinds + 1 WHERE id = 1")
	}
	if err != nil {
		return fmt.Errorf("free run from input: %w", err)
	}
	return nil
}

// pause stops a run until a person decides, and says so on its topic. detail, if any, stays here.
func pause(ctx context.Context, tx *sqlite.Tx, c *claim, head outbox.Head, step int64, reason, detail string) error {
	paused := record.Record{Kind: record.Event, Type: record.TypeRunPaused, Data: appendReason(nil, reason), Occurred: tx.NowUS,
		Correlation: c.cause.correlation, Causation: c.cause.causation, Trace: c.cause.trace}
	if detail != "" {
		reason = detail
	}
	if _, err := appendTo(ctx, tx, head, step, []record.Record{paused}); err != nil {
		return err
	}
	_, _, err := tx.Exec(ctx, "UPDATE run SET status = 'paused', wake_us = NULL, last_error = ?, updated_us = ? WHERE id = ?", reason, tx.NowUS, c.run)
	return err
}

// verdict is what a failed attempt leads to.
type verdict struct {
	reason     string // for this node's operator
	public     string // for everybody: what else is known of a failure may hold an agent's state or its command's secrets
	status     string // waiting, paused, or dead: the input is set aside
	wakeUS     int64  // waiting
	countsAsOf int64  // attempts after this one; a busy agent's stay as they were
}

// failStep records a failed attempt. The step has not happened; the run waits, is paused, or goes on without the input.
func failStep(ctx context.Context, tx *sqlite.Tx, c *claim, v verdict) error {
	n, _, err := tx.Exec(ctx, `UPDATE run SET status = 'waiting', wake_us = ?, attempts = ?, last_error = ?, updated_us = ?
		WHERE id = ? AND live = ? AND claim = ? AND status = 'running'`, v.wakeUS, v.countsAsOf, v.reason, tx.NowUS, c.run, c.head.Branch, c.no)
	if err != nil {
		return fmt.Errorf("record failed attempt: %w", err)
	}
	if n != 1 {
		return errFenced
	}
	if c.input != nil {
		var next any
		if v.status == "waiting" {
			next = v.wakeUS
		}
		_, _, err := tx.Exec(ctx, "UPDATE inbox SET attempts = ?, next_us = ?, last_error = ? WHERE id = ?", v.countsAsOf, next, v.reason, c.input.row)
		if err != nil {
			return fmt.Errorf("record failed attempt: %w", err)
		}
	}
	switch {
	case v.status == "waiting":
		return nil
	case v.status == "paused" || c.input == nil:
		return pause(ctx, tx, c, c.head, c.step-1, v.public, v.reason)
	}
	if _, _, err := tx.Exec(ctx, "UPDATE inbox SET ended_us = ?, outcome = 'dead', reason = ? WHERE id = ?", tx.NowUS, v.reason, c.input.row); err != nil {
		return fmt.Errorf("set input aside: %w", err)
	}
	_, _, err = tx.Exec(ctx, "UPDATE run SET status = 'ready', wake_us = ?, claim_step = NULL, claim_input = NULL, attempts = 0, last_error = NULL WHERE id = ?",
		tx.SteadyUS, c.run)
	return err
}

// giveBack puts a claimed step back untouched: the process stops.
func giveBack(ctx context.Context, tx *sqlite.Tx, c *claim) error {
	n, _, err := tx.Exec(ctx, `UPDATE run SET status = 'ready', wake_us = ?, updated_us = ?
		WHERE id = ? AND live = ? AND claim = ? AND status = 'running'`, tx.SteadyUS, tx.NowUS, c.run, c.head.Branch, c.no)
	if err == nil && n != 1 {
		err = errFenced
	}
	return err
}
