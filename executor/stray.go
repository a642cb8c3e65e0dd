package executor

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"postrider/internal/sqlite"
)

// stray is a due inbox row without a run: on its way to another node, or not yet given to its run.
type stray struct {
	row int64
	arrival
}

// strayAt reads a stray inside a transaction; nil when it is none any more, or is to wait.
func strayAt(ctx context.Context, tx *sqlite.Tx, row int64) (*stray, error) {
	s := stray{row: row}
	err := tx.Get(ctx, `SELECT tenant, run_name, agent, COALESCE(node, ''), input_id, type, source, hops, COALESCE(correlation, ''),
		COALESCE(causation, ''), COALESCE(trace, ''), COALESCE(expires_us, 0), COALESCE(created_branch, 0), COALESCE(created_step, 0), data
		FROM inbox WHERE id = ?1 AND run IS NULL AND consumed_branch IS NULL AND cancelled_branch IS NULL AND ended_us IS NULL
		AND due_us <= ?2 AND COALESCE(next_us, 0) <= ?2`, []any{row, tx.SteadyUS},
		&s.tenant, &s.run, &s.agent, &s.node, &s.id, &s.typ, &s.source, &s.hops, &s.correlation, &s.causation, &s.trace, &s.expires,
		&s.createdBranch, &s.createdStep, &s.data)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read input of row %d: %w", row, err)
	}
	return &s, nil
}

const (
	strayBatch = 64          // inputs of one transaction
	strayPause = time.Minute // between looks at an input that can go nowhere
	strayLook  = 2000        // rows that one look passes: a crowd that waits must not take the processor at every poll
)

// bestEffortOnly and its negation tell the relay's strays from those that the executor passes on.
const bestEffortOnly = `(i.node IS NULL AND i.agent IN (SELECT agent FROM route WHERE best_effort = 1) AND i.agent NOT IN (SELECT name FROM agent WHERE hosted = 1))`

// headOf is the first stray of the run that i is for, in the order of a run.
const headOf = `(SELECT h.id FROM inbox h INDEXED BY inbox_stray WHERE h.tenant = i.tenant AND h.run_name = i.run_name AND h.agent = i.agent
	AND h.node IS i.node AND h.run IS NULL AND h.consumed_branch IS NULL AND h.cancelled_branch IS NULL AND h.ended_us IS NULL
	ORDER BY h.due_us, h.id LIMIT 1)`

// look is how far a walk through the strays, in order of due and id, has come; the zero value begins it.
type look struct{ due, id int64 }

// strays lists the rows of due strays, in order, those that the condition on i holds for, as far as one look goes; the
// next one goes on from there. One comes only behind all others of its run that are before it: nothing overtakes one that
// is to wait.
func (l *look) strays(ctx context.Context, store *sqlite.Store, condition string, limit int) (rows []int64, err error) {
	type of struct{ tenant, run, agent, node string }
	list, err := store.Query(ctx, `SELECT i.id, i.due_us, i.tenant, i.run_name, i.agent, COALESCE(i.node, ''),
		COALESCE(i.next_us, 0) <= ?1 AND `+condition+`, `+headOf+` FROM inbox i INDEXED BY inbox_pending
		WHERE i.run IS NULL AND i.consumed_branch IS NULL AND i.cancelled_branch IS NULL AND i.ended_us IS NULL AND i.due_us <= ?1
		AND (i.due_us, i.id) > (?2, ?3) ORDER BY i.due_us, i.id LIMIT ?4`, store.SteadyUS(), l.due, l.id, strayLook)
	if err != nil {
		return nil, fmt.Errorf("look for inputs to pass on: %w", err)
	}
	defer list.Close()
	passed, began := 0, map[of]bool{}
	for len(rows) < limit && list.Next() {
		var head int64
		var run of
		var fit bool
		if err := list.Scan(&l.id, &l.due, &run.tenant, &run.run, &run.agent, &run.node, &fit, &head); err != nil {
			return nil, fmt.Errorf("look for inputs to pass on: %w", err)
		}
		passed++
		if began[run] = fit && (head == l.id || began[run]); began[run] {
			rows = append(rows, l.id)
		}
	}
	if err := list.Err(); err != nil {
		return nil, fmt.Errorf("look for inputs to pass on: %w", err)
	}
	if len(rows) < limit && passed < strayLook {
		*l = look{} // that was the last one
	}
	return rows, nil
}

// straysBefore says whether strays wait that an input for this node comes behind: it has to go the same way.
func straysBefore(ctx context.Context, tx *sqlite.Tx, a arrival) (yes bool, err error) {
	err = tx.Get(ctx, `SELECT EXISTS (SELECT 1 FROM inbox INDEXED BY inbox_stray WHERE tenant = ?1 AND run_name = ?2 AND due_us <= ?3 AND agent = ?4
		AND (node IS NULL OR node = (SELECT node FROM meta WHERE id = 1)) AND run IS NULL AND consumed_branch IS NULL
		AND cancelled_branch IS NULL AND ended_us IS NULL)`, []any{a.tenant, a.run, a.due(tx), a.agent}, &yes)
	if err != nil {
		return false, fmt.Errorf("look for inputs before %s: %w", a.id, err)
	}
	return yes, nil
}
