package executor

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"

	"postrider/internal/sqlite"
)

// Link is a step with what went in and what came of it: one link of the chain from input to record to the next input.
type Link struct {
	StepInfo
	Live     bool         // no rewind took it back
	State    []byte       // after it, JSON as the agent gave it; nil unless asked for
	In       *InputInfo   // nil: none
	Records  []RecordInfo // ascending by LSN
	Commands []InputInfo  // inputs that it gave to runs of this node, timers among them
}

// RecordInfo is a record that a step made.
type RecordInfo struct {
	LSN                           int64
	Kind                          string // event, command, message
	Type, Subject                 string
	Destination                   string // topic of a message, agent@node of a command
	Run, InputID                  string // of a command
	State                         string // as in outbox.States
	Correlation, Causation, Trace string
	Data                          []byte // nil unless asked for
}

// Chain reads the newest steps of a run's live lineage, at most limit, in their order; ErrNotFound when there is no such run.
func Chain(ctx context.Context, store *sqlite.Store, tenant, run string, limit int) ([]Link, error) {
	tx, err := store.Reader().BeginTx(ctx, nil)
	if err != nil {
		return nil, fmt.Errorf("read chain of run %s: %w", run, err)
	}
	defer tx.Rollback()
	steps, err := readSteps(ctx, tx, tenant, run, 0, limit)
	if err != nil {
		return nil, err
	}
	slices.Reverse(steps)
	list := make([]Link, len(steps))
	for i, s := range steps {
		list[i] = Link{StepInfo: s, Live: true}
		if err := list[i].read(ctx, store, tx, false); err != nil {
			return nil, fmt.Errorf("read step %d of run %s: %w", s.Step, run, err)
		}
	}
	return list, nil
}

// EffectsOf reads one step of any branch, with all data; ErrNotFound when there is none.
func EffectsOf(ctx context.Context, store *sqlite.Store, branch string, step int64) (Link, error) {
	tx, err := store.Reader().BeginTx(ctx, nil)
	if err != nil {
		return Link{}, fmt.Errorf("read step %d of branch %s: %w", step, branch, err)
	}
	defer tx.Rollback()
	l := Link{StepInfo: StepInfo{Branch: branch}}
	err = tx.QueryRowContext(ctx, "SELECT id FROM branch WHERE ulid = ?", branch).Scan(&l.branch)
	if err == nil {
		err = tx.QueryRowContext(ctx, stepsQuery, l.branch, step, 1).Scan(l.dest()...)
	}
	if errors.Is(err, sql.ErrNoRows) || err == nil && l.Step != step {
		return Link{}, fmt.Errorf("%w: branch %s has no step %d", ErrNotFound, branch, step)
	}
	if err == nil {
		err = tx.QueryRowContext(ctx, `WITH RECURSIVE up (id, parent, fork_step, last) AS (
			SELECT l.id, l.parent, l.fork_step, l.head_step FROM branch b JOIN run r ON r.id = b.run JOIN branch l ON l.id = r.live WHERE b.id = ?1
			UNION ALL SELECT p.id, p.parent, p.fork_step, u.fork_step FROM up u JOIN branch p ON p.id = u.parent)
			SELECT EXISTS (SELECT 1 FROM up WHERE id = ?1 AND last >= ?2)`, l.branch, step).Scan(&l.Live)
	}
	if err == nil {
		err = tx.QueryRowContext(ctx, "SELECT COALESCE(c.state, (SELECT state FROM checkpoint WHERE id = c.base_id)) FROM checkpoint c WHERE c.id = ?", l.row).Scan(&l.State)
	}
	if err == nil {
		err = l.read(ctx, store, tx, true)
	}
	if err != nil {
		return Link{}, fmt.Errorf("read step %d of branch %s: %w", step, branch, err)
	}
	return l, nil
}

func (l *Link) read(ctx context.Context, store *sqlite.Store, tx *sql.Tx, data bool) error {
	inputs := func(where string, args ...any) ([]InputInfo, error) {
		rows, err := tx.QueryContext(ctx, inputQuery+where, append([]any{store.SteadyUS(), data}, args...)...)
		if err != nil {
			return nil, err
		}
		return scanInputs(store, rows)
	}
	if l.input != 0 {
		in, err := inputs("WHERE i.id = ?3", l.input)
		if err != nil {
			return err
		}
		if len(in) == 1 {
			l.In = &in[0]
		}
	}
	var err error
	if l.Commands, err = inputs("WHERE i.created_branch = ?3 AND i.created_step = ?4 ORDER BY i.id", l.branch, l.Step); err != nil {
		return err
	}
	rows, err := tx.QueryContext(ctx, stepRecordsQuery, l.branch, l.LSN, l.Step, data)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var r RecordInfo
		if err := rows.Scan(&r.LSN, &r.Kind, &r.Type, &r.Subject, &r.Destination, &r.Run, &r.InputID, &r.State, &r.Correlation, &r.Causation, &r.Trace, &r.Data); err != nil {
			return err
		}
		l.Records = append(l.Records, r)
	}
	return rows.Err()
}

// stepRecordsQuery lists the records of step ?3 of branch ?1, the last of which is at most at LSN ?2: from the next mark, or
// the branch's newest, down the chain to the step before. The runtime's own, which came after the step's checkpoint, are
// above ?2.
const stepRecordsQuery = `WITH RECURSIVE walk (id, prev_id, lsn, step) AS (
	SELECT id, prev_id, lsn, step FROM outbox WHERE id = COALESCE(
		(SELECT id FROM outbox WHERE branch = ?1 AND lsn = (?2 + 15) / 16 * 16 AND lsn % 16 = 0),
		(SELECT tail_id FROM branch WHERE id = ?1))
	UNION ALL SELECT o.id, o.prev_id, o.lsn, o.step FROM walk w JOIN outbox o ON o.id = w.prev_id WHERE w.lsn > ?2 OR w.step = ?3)
	SELECT o.lsn, v.kind, o.type, COALESCE(o.subject, ''), v.destination, COALESCE(o.to_run, ''), COALESCE(o.input_id, ''), v.state,
	COALESCE(o.correlation, ''), COALESCE(o.causation, ''), COALESCE(o.trace, ''), iif(?4, o.data, NULL)
	FROM walk w JOIN outbox o ON o.id = w.id JOIN record_state v ON v.id = o.id WHERE w.lsn <= ?2 AND w.step = ?3 ORDER BY o.lsn`
