package executor

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"slices"

	"postrider/internal/record"
	"postrider/internal/sqlite"
)

// TailCursor is a place in a run's history: after which events Tail goes on. The zero value is before the first.
//
// A run's branches are live one after the other, in order of gen, and an abandoned one gets no step any more. So (gen,
// step) orders all that ever happened in a run, also across rewinds; a branch opens at its fork step.
type TailCursor struct {
	gen, step    int64
	deadUS, dead int64 // the last input that was set aside: when, and its row
}

// Event is one thing that happened in a run.
type Event struct {
	Kind      string // step; rewind: a branch was opened; dead: an input was set aside
	Branch    string
	Gen       int64
	Step      int64  // of a rewind: the fork step
	LSN       int64  // head after it; of a rewind: the fork LSN
	Next      string // step
	Input     string // step, dead: input id; "": none
	InputType string
	Parent    string // rewind
	Reason    string // rewind, dead
	StartedUS int64  // step
	AtUS      int64
	Data      []byte // of the input, if asked for; nil: there is none
	State     []byte // after the step, if asked for
}

// Tailed is one look at a run: what happened since the last one, in order, and how the run stands after it.
type Tailed struct {
	Events []Event
	More   bool // events were left for the next look, which should follow at once
	RunInfo
	Claim int64 // grows with each step and attempt: two equal looks are of one and the same rest
}

// Tail reads at most limit events of a run after the cursor, which it moves, in one short snapshot. Called again and
// again it gives each event exactly once, however many commits and rewinds lie between two calls. withData adds the
// inputs' data and the states. RunInfo has no counts and no dead letter's reason. ErrNotFound when there is no such run.
func Tail(ctx context.Context, store *sqlite.Store, tenant, run string, after *TailCursor, limit int, withData bool) (Tailed, error) {
	tx, err := store.Reader().BeginTx(ctx, nil)
	if err != nil {
		return Tailed{}, fmt.Errorf("tail run %s: %w", run, err)
	}
	defer tx.Rollback()
	id, t, err := tailedRun(ctx, tx, tenant, run)
	if err != nil {
		return Tailed{}, err
	}
	if err := t.read(ctx, tx, id, after, limit, withData); err != nil {
		return Tailed{}, fmt.Errorf("tail run %s: %w", run, err)
	}
	t.RunInfo.read(store)
	return t, nil
}

func (t *Tailed) read(ctx context.Context, tx *sql.Tx, run int64, after *TailCursor, limit int, withData bool) error {
	at := *after
	branches, err := tailedBranches(ctx, tx, run, tailBranchesQuery, at.gen, limit+2) // the first may be told already, the last tells that there are more
	if err != nil {
		return err
	}
	for _, b := range branches {
		if len(t.Events) == limit {
			t.More = true
			break
		}
		if b.gen > at.gen {
			at.gen, at.step = b.gen, b.forkStep
			if b.parent != "" {
				t.Events = append(t.Events, Event{Kind: "rewind", Branch: b.ulid, Gen: b.gen, Step: b.forkStep, LSN: b.forkLSN, Parent: b.parent,
					Reason: b.reason, AtUS: b.openedUS})
			}
		}
		upTo := b.headStep
		if room := int64(limit - len(t.Events)); upTo-at.step > room {
			upTo, t.More = at.step+room, true
		}
		if upTo <= at.step {
			continue
		}
		steps, err := tailedSteps(ctx, tx, b, at.step, upTo, withData)
		if err != nil {
			return err
		}
		t.Events, at.step = append(t.Events, steps...), upTo
		if t.More {
			break
		}
	}
	if !t.More {
		dead, err := tailedDead(ctx, tx, run, &at, limit, withData)
		if err != nil {
			return err
		}
		t.Events, t.More = merge(t.Events, dead), len(dead) == limit
	}
	*after = at
	return nil
}

// merge puts the dead where they belong by time. The steps keep their order, whatever clocks said.
func merge(steps, dead []Event) (all []Event) {
	for _, e := range steps {
		for len(dead) > 0 && dead[0].AtUS < e.AtUS {
			all, dead = append(all, dead[0]), dead[1:]
		}
		all = append(all, e)
	}
	return append(all, dead...)
}

// TailFrom is the cursor before the last steps and rewinds of a run, of which there may be fewer, and the inputs that were
// set aside among them. ErrNotFound when there is no such run.
func TailFrom(ctx context.Context, store *sqlite.Store, tenant, run string, last int) (TailCursor, error) {
	tx, err := store.Reader().BeginTx(ctx, nil)
	if err != nil {
		return TailCursor{}, fmt.Errorf("tail run %s: %w", run, err)
	}
	defer tx.Rollback()
	id, _, err := tailedRun(ctx, tx, tenant, run)
	if err != nil {
		return TailCursor{}, err
	}
	newest, err := tailedBranches(ctx, tx, id, newestBranchesQuery, 0, last+1)
	if err != nil {
		return TailCursor{}, fmt.Errorf("tail run %s: %w", run, err)
	}
	var at TailCursor
	left := int64(last)
	for _, b := range newest {
		at = TailCursor{gen: b.gen, step: max(b.forkStep, b.headStep-left)}
		if left -= b.headStep - at.step; left == 0 {
			break
		}
		if at.gen--; b.parent != "" { // its rewind is one more
			left--
		}
		at.step = math.MaxInt64 // all of the one before
		if left == 0 {
			break
		}
	}
	// Of those set aside, as many at most.
	err = tx.QueryRowContext(ctx, "SELECT ended_us, id FROM inbox WHERE run = ? AND outcome = 'dead' ORDER BY ended_us DESC, id DESC LIMIT 1 OFFSET ?", id, last).
		Scan(&at.deadUS, &at.dead)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return TailCursor{}, fmt.Errorf("tail run %s: %w", run, err)
	}
	if left == 0 && last > 0 {
		first, ahead := Tailed{}, at
		ahead.deadUS = math.MaxInt64 // none
		if err := first.read(ctx, tx, id, &ahead, 1, false); err != nil {
			return TailCursor{}, fmt.Errorf("tail run %s: %w", run, err)
		}
		if us := first.Events[0].AtUS; us > at.deadUS {
			at.deadUS, at.dead = us, 0
		}
	}
	return at, nil
}

func tailedRun(ctx context.Context, tx *sql.Tx, tenant, run string) (id int64, t Tailed, err error) {
	err = tx.QueryRowContext(ctx, `SELECT r.id, r.tenant, r.name, r.agent,
		iif(r.status = 'running' AND r.claim_alone IS NULL, 'ready', r.status), b.ulid, b.gen, b.head_step, b.head_lsn, r.attempts,
		COALESCE(r.last_error, ''), COALESCE(r.wake_us, 0), r.updated_us, r.claim FROM run r JOIN branch b ON b.id = r.live
		WHERE r.tenant = ? AND r.name = ? AND r.name <> ?`, tenant, run, record.NodeRun).Scan(&id, &t.Tenant, &t.Run, &t.Agent, &t.Status, &t.Branch, &t.Gen, &t.Step, &t.LSN,
		&t.Attempts, &t.LastError, &t.WakeUS, &t.UpdatedUS, &t.Claim)
	if errors.Is(err, sql.ErrNoRows) {
		return 0, Tailed{}, fmt.Errorf("%w: tenant %s has no run %s", ErrNotFound, tenant, run)
	}
	if err != nil {
		return 0, Tailed{}, fmt.Errorf("tail run %s: %w", run, err)
	}
	return id, t, nil
}

type tailedBranch struct {
	id, gen            int64
	ulid, parent       string // parent "": root
	forkStep, forkLSN  int64
	headStep, openedUS int64
	reason             string
}

const (
	branchColumns = `SELECT b.id, b.gen, b.ulid, COALESCE(p.ulid, ''), b.fork_step, b.fork_lsn, b.head_step, b.opened_us, COALESCE(b.reason, '')
		FROM branch b LEFT JOIN branch p ON p.id = b.parent `
	tailBranchesQuery   = branchColumns + "WHERE b.run = ? AND b.gen >= ? ORDER BY b.gen LIMIT ?"
	newestBranchesQuery = branchColumns + "WHERE b.run = ? AND b.gen > ? ORDER BY b.gen DESC LIMIT ?"
)

func tailedBranches(ctx context.Context, tx *sql.Tx, run int64, query string, gen int64, limit int) (list []tailedBranch, err error) {
	rows, err := tx.QueryContext(ctx, query, run, gen, limit)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var b tailedBranch
		if err := rows.Scan(&b.id, &b.gen, &b.ulid, &b.parent, &b.forkStep, &b.forkLSN, &b.headStep, &b.openedUS, &b.reason); err != nil {
			return nil, err
		}
		list = append(list, b)
	}
	return list, rows.Err()
}

// tailQuery lists a branch's steps (?2, ?3], newest first, from the next mark or the branch's newest down the chain.
const tailQuery = `WITH RECURSIVE walk (id, prev_id, step) AS (
	SELECT id, prev_id, step FROM checkpoint WHERE branch = ?1 AND id = COALESCE(
		(SELECT id FROM checkpoint WHERE branch = ?1 AND step = (?3 + 15) / 16 * 16 AND step % 16 = 0),
		(SELECT head_id FROM branch WHERE id = ?1))
	UNION ALL SELECT c.id, c.prev_id, c.step FROM walk w JOIN checkpoint c ON c.id = w.prev_id WHERE w.step > ?2 + 1)
	SELECT c.step, COALESCE(i.input_id, ''), COALESCE(i.type, ''), c.lsn, c.next, c.started_us, c.committed_us,
		iif(?4, i.data, NULL), iif(?4, COALESCE(c.state, (SELECT state FROM checkpoint WHERE id = c.base_id)), NULL)
	FROM walk w JOIN checkpoint c ON c.id = w.id LEFT JOIN inbox i ON i.id = c.input WHERE w.step > ?2 AND w.step <= ?3`

func tailedSteps(ctx context.Context, tx *sql.Tx, b tailedBranch, after, upTo int64, withData bool) (list []Event, err error) {
	rows, err := tx.QueryContext(ctx, tailQuery, b.id, after, upTo, withData)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		e := Event{Kind: "step", Branch: b.ulid, Gen: b.gen}
		if err := rows.Scan(&e.Step, &e.Input, &e.InputType, &e.LSN, &e.Next, &e.StartedUS, &e.AtUS, &e.Data, &e.State); err != nil {
			return nil, err
		}
		list = append(list, e)
	}
	slices.Reverse(list)
	return list, rows.Err()
}

// tailedDead reads the inputs that were set aside after the cursor, and moves it. One of an earlier row may die later: the
// order is that of their deaths.
func tailedDead(ctx context.Context, tx *sql.Tx, run int64, at *TailCursor, limit int, withData bool) (list []Event, err error) {
	rows, err := tx.QueryContext(ctx, `SELECT id, ended_us, input_id, type, COALESCE(reason, ''), iif(?4, data, NULL) FROM inbox
		WHERE run = ?1 AND outcome = 'dead' AND (ended_us, id) > (?2, ?3) ORDER BY ended_us, id LIMIT ?5`, run, at.deadUS, at.dead, withData, limit)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		e := Event{Kind: "dead"}
		if err := rows.Scan(&at.dead, &e.AtUS, &e.Input, &e.InputType, &e.Reason, &e.Data); err != nil {
			return nil, err
		}
		at.deadUS = e.AtUS
		list = append(list, e)
	}
	return list, rows.Err()
}
