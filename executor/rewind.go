package executor

import (
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

// Rewound says what a rewind did.
type Rewound struct {
	Tenant   string `json:"tenant"`
	Run      string `json:"run"`
	Branch   string `json:"branch"` // the new live one
	Gen      int64  `json:"gen"`
	Parent   string `json:"parent"`
	ForkStep int64  `json:"fork_step"`
	ForkLSN  int64  `json:"fork_lsn"`
	Withheld int64  `json:"withheld"` // records of the abandoned steps that were not shipped and will not be
	Shipped  int64  `json:"shipped"`  // records of the abandoned steps that were shipped before
	Restored int64  `json:"restored"` // inputs that are pending again
	Removed  int64  `json:"removed"`  // inputs that never existed: abandoned steps created them
}

// stretch is the part of one branch that belongs to a lineage: steps (from, to].
type stretch struct {
	branch, parent int64
	ulid           string
	from, to       int64 // step; the root's includes step 0
	forkLSN        int64
	exportable     int64
	shipped        int64
}

// Rewind opens a new live branch of a run at step to of its live lineage, in one transaction: the step in progress is
// fenced, records after the fork that were not shipped are withheld, and postrider.branch.opened is the first record of
// the new branch. What was pending at that step is pending again: inputs that the kept lineage created and abandoned
// steps consumed or cancelled; those created by abandoned steps are removed. Inputs from outside that abandoned steps
// consumed are not given again. Errors: ErrNotFound (no such run or step).
func Rewind(ctx context.Context, store *sqlite.Store, tenant, name string, to int64, reason string) (Rewound, error) {
	if err := record.CheckText(reason); err != nil || len(reason) > 1024 {
		return Rewound{}, fmt.Errorf("%w reason: at most 1024 bytes of text without control characters", ErrInvalid)
	}
	if reason == "" {
		reason = "rewind"
	}
	var out Rewound
	err := store.Write(ctx, func(ctx context.Context, tx *sqlite.Tx) (err error) {
		out, err = rewind(ctx, tx, tenant, name, to, reason)
		return err
	})
	if err != nil {
		return Rewound{}, err
	}
	return out, nil
}

func rewind(ctx context.Context, tx *sqlite.Tx, tenant, name string, to int64, reason string) (Rewound, error) {
	run, _, _, err := findRun(ctx, tx, tenant, name)
	if errors.Is(err, sql.ErrNoRows) || name == record.NodeRun { // which is no run, and is never rewound
		return Rewound{}, fmt.Errorf("%w: tenant %s has no run %s", ErrNotFound, tenant, name)
	}
	if err != nil {
		return Rewound{}, err
	}
	lineage, err := liveLineage(ctx, tx, run)
	if err != nil {
		return Rewound{}, err
	}
	if to < 0 || to > lineage[0].to {
		return Rewound{}, fmt.Errorf("%w: run %s has steps 0 to %d, not %d", ErrNotFound, name, lineage[0].to, to)
	}
	// The parent is the branch that holds the step's checkpoint: the first, from the live one up, that forked before it.
	at := 0
	for lineage[at].parent != 0 && to <= lineage[at].from {
		at++
	}
	holder := lineage[at]
	var checkpoint, lsn, eventLSN, bytes int64
	var next string
	err = tx.Get(ctx, stepQuery, []any{holder.branch, to}, &checkpoint, &next, &lsn, &eventLSN, &bytes)
	if errors.Is(err, sql.ErrNoRows) {
		return Rewound{}, fmt.Errorf("%w: step %d of run %s is no longer kept", ErrNotFound, to, name)
	}
	if err != nil {
		return Rewound{}, fmt.Errorf("find step %d: %w", to, err)
	}
	out := Rewound{Tenant: tenant, Run: name, Parent: holder.ulid, ForkStep: to, ForkLSN: lsn}

	// Abandoned: all of the branches below the holder, and the holder's records after the fork.
	for i, s := range lineage[:at+1] {
		keep, keepBytes := s.forkLSN, int64(0)
		if i == at {
			keep, keepBytes = lsn, bytes
		}
		_, _, err := tx.Exec(ctx, "UPDATE branch SET exportable = ?, export_bytes = ? WHERE id = ? AND exportable > ?", keep, keepBytes, s.branch, keep)
		if err != nil {
			return Rewound{}, fmt.Errorf("withhold records: %w", err)
		}
		out.Shipped += max(0, min(s.shipped, s.exportable)-keep)
		out.Withheld += max(0, s.exportable-max(s.shipped, keep))
	}
	if out.Restored, out.Removed, err = rewindInbox(ctx, tx, run, lineage, at, to); err != nil {
		return Rewound{}, err
	}
	for _, s := range lineage[:at+1] { // what they had handed over
		withheld, shipped, err := outbox.WithholdCreated(ctx, tx, s.branch, max(s.from, to), s.to)
		if err != nil {
			return Rewound{}, err
		}
		out.Withheld += withheld
		out.Shipped += shipped
	}

	opened := record.BranchOpened{Parent: holder.ulid, ForkStep: to, ForkLSN: lsn, Reason: reason}
	first := record.Record{Kind: record.Event, Type: record.TypeBranchOpened, Data: opened.AppendData(nil), Occurred: tx.NowUS}
	head, err := openBranch(ctx, tx, branchStart{run: run, tenant: tenant, parent: holder.branch, step: to, lsn: lsn, eventLSN: eventLSN,
		checkpoint: checkpoint, reason: reason}, first)
	if err != nil {
		return Rewound{}, err
	}
	if err := tx.Get(ctx, "SELECT ulid, gen FROM branch WHERE id = ?", []any{head.Branch}, &out.Branch, &out.Gen); err != nil {
		return Rewound{}, fmt.Errorf("read new branch: %w", err)
	}
	// A new claim number fences the step in progress; what the run does next is decided when it is claimed.
	status := map[agent.Next]string{agent.Done: "done", agent.Fail: "failed"}[agent.Next(next)]
	wakeUS := any(nil)
	if status == "" {
		status, wakeUS = "ready", tx.SteadyUS
	}
	_, _, err = tx.Exec(ctx, `UPDATE run SET status = ?, wake_us = ?, claim = claim + 1, claim_step = NULL, claim_input = NULL, attempts = 0,
		continues = 0, last_error = NULL, updated_us = ? WHERE id = ?`, status, wakeUS, tx.NowUS, run)
	if err != nil {
		return Rewound{}, fmt.Errorf("rewind run: %w", err)
	}
	if _, _, err := tx.Exec(ctx, "UPDATE meta SET rewinds = rewinds + 1 WHERE id = 1"); err != nil {
		return Rewound{}, fmt.Errorf("count rewind: %w", err)
	}
	return out, nil
}

// stepQuery finds the checkpoint of (branch, step): from the next mark, or the branch's newest, down the chain.
const stepQuery = `WITH RECURSIVE walk (id, prev_id, step) AS (
	SELECT id, prev_id, step FROM checkpoint WHERE id = COALESCE(
		(SELECT id FROM checkpoint WHERE branch = ?1 AND step = (?2 + 15) / 16 * 16 AND step % 16 = 0),
		(SELECT head_id FROM branch WHERE id = ?1))
	UNION ALL SELECT c.id, c.prev_id, c.step FROM walk w JOIN checkpoint c ON c.id = w.prev_id WHERE w.step > ?2)
	SELECT c.id, c.next, c.lsn, c.event_lsn, c.bytes FROM walk w JOIN checkpoint c ON c.id = w.id WHERE w.step = ?2 AND c.branch = ?1`

// liveLineage lists the stretches of a run's live lineage, from the live branch up to the root.
func liveLineage(ctx context.Context, tx *sqlite.Tx, run int64) ([]stretch, error) {
	var next int64
	if err := tx.Get(ctx, "SELECT live FROM run WHERE id = ?", []any{run}, &next); err != nil {
		return nil, fmt.Errorf("read live branch: %w", err)
	}
	var list []stretch
	for next != 0 {
		var s stretch
		var forkStep, headStep int64
		err := tx.Get(ctx, "SELECT id, ulid, COALESCE(parent, 0), fork_step, fork_lsn, head_step, exportable, shipped FROM branch WHERE id = ?", []any{next},
			&s.branch, &s.ulid, &s.parent, &forkStep, &s.forkLSN, &headStep, &s.exportable, &s.shipped)
		if err != nil {
			return nil, fmt.Errorf("read branch %d: %w", next, err)
		}
		s.from, s.to = forkStep, headStep
		if n := len(list); n > 0 {
			s.to = list[n-1].from
		}
		list = append(list, s)
		next = s.parent
	}
	return list, nil
}

// rewindInbox puts back what the abandoned steps, those after step to in lineage[:at+1], took from the inbox or put into
// it. What an earlier rewind abandoned was put back by that one, and its ids may have a new owner. A step counts as
// creator or consumer only while it is on its run's live lineage.
func rewindInbox(ctx context.Context, tx *sqlite.Tx, run int64, lineage []stretch, at int, to int64) (restored, removed int64, err error) {
	for _, s := range lineage[:at+1] {
		// Created by them: never existed, unless a step that stands consumed it.
		created, err := trace(ctx, tx, `SELECT id, COALESCE(run, 0), due_us, COALESCE(consumed_branch, 0), COALESCE(consumed_step, 0) FROM inbox
			WHERE created_branch = ? AND created_step > ? AND created_step <= ? ORDER BY created_step, id`, s.branch, max(s.from, to), s.to)
		if err != nil {
			return 0, 0, err
		}
		for _, in := range created {
			if in.branch != 0 && in.run != run {
				stands, err := onLiveLineage(ctx, tx, in.run, in.branch, in.step)
				if err != nil {
					return 0, 0, err
				}
				if stands {
					continue
				}
			}
			if err := forget(ctx, tx, in.id); err != nil {
				return 0, 0, err
			}
			if in.branch != 0 {
				continue // kept as what an abandoned step consumed
			}
			if in.run != run {
				if err := letGo(ctx, tx, in.run, in.id); err != nil {
					return 0, 0, err
				}
			}
			if _, _, err := tx.Exec(ctx, "DELETE FROM inbox WHERE id = ?", in.id); err != nil {
				return 0, 0, fmt.Errorf("remove input of an abandoned step: %w", err)
			}
			removed++
		}
	}
	for _, s := range lineage[:at+1] {
		// Consumed or cancelled by them, and created by a step that stands: pending again.
		consumed, err := trace(ctx, tx, `WITH RECURSIVE walk (prev_id, step, input) AS (
			SELECT c.prev_id, c.step, c.input FROM branch b JOIN checkpoint c ON c.id = b.head_id AND c.branch = b.id WHERE b.id = ?1
			UNION ALL SELECT c.prev_id, c.step, c.input FROM walk w JOIN checkpoint c ON c.id = w.prev_id WHERE c.step > ?2)
			SELECT i.id, COALESCE(i.run, 0), i.due_us, COALESCE(i.created_branch, 0), COALESCE(i.created_step, 0) FROM walk w JOIN inbox i ON i.id = w.input
			WHERE w.step > ?2 AND i.consumed_branch = ?1 AND i.consumed_step = w.step`, s.branch, max(s.from, to))
		if err != nil {
			return 0, 0, err
		}
		cancelled, err := trace(ctx, tx, `SELECT id, COALESCE(run, 0), due_us, COALESCE(created_branch, 0), COALESCE(created_step, 0) FROM inbox
			WHERE cancelled_branch = ? AND cancelled_step > ? ORDER BY id`, s.branch, max(s.from, to))
		if err != nil {
			return 0, 0, err
		}
		for _, in := range append(consumed, cancelled...) {
			if !slices.ContainsFunc(lineage[at:], func(s stretch) bool { return s.branch == in.branch && in.step <= min(s.to, to) }) {
				continue
			}
			if err := giveAgain(ctx, tx, in); err != nil {
				return 0, 0, err
			}
			restored++
		}
	}
	return restored, removed, nil
}

// giveAgain makes an input pending again. A timer by the wall clock may have missed that the clock was set.
func giveAgain(ctx context.Context, tx *sqlite.Tx, in touched) error {
	_, _, err := tx.Exec(ctx, `UPDATE inbox SET consumed_branch = NULL, consumed_step = NULL, cancelled_branch = NULL, cancelled_step = NULL,
		attempts = 0, next_us = NULL, last_error = NULL, due_us = iif(at_us IS NULL, due_us, `+timeOfAt+`) WHERE id = ?1`,
		in.id, nil, tx.SteadyUS, tx.WallUS)
	if err != nil {
		return fmt.Errorf("give input of the kept lineage again: %w", err)
	}
	a := arrival{explicit: true}
	var due int64
	var commandID string
	err = tx.Get(ctx, "SELECT tenant, run_name, input_id, agent, type, data, hops, due_us, COALESCE(command_id, '') FROM inbox WHERE id = ?", []any{in.id},
		&a.tenant, &a.run, &a.id, &a.agent, &a.typ, &a.data, &a.hops, &due, &commandID)
	if err == nil && commandID != "" { // cancelled, it had let go of its id
		err = remember(ctx, tx, a, in.id, "")
	}
	if err != nil {
		return fmt.Errorf("give input of the kept lineage again: %w", err)
	}
	return wake(ctx, tx, in.run, max(due, tx.SteadyUS))
}

// onLiveLineage says whether a step of a run stands.
func onLiveLineage(ctx context.Context, tx *sqlite.Tx, run, branch, step int64) (bool, error) {
	lineage, err := liveLineage(ctx, tx, run)
	return slices.ContainsFunc(lineage, func(s stretch) bool { return s.branch == branch && step <= s.to }), err
}

// forget makes the id of an input that is taken back, or cancelled, usable again. A dead letter for other content under the id of a former input leaves that one
// alone.
func forget(ctx context.Context, tx *sqlite.Tx, input int64) error {
	n, _, err := tx.Exec(ctx, `DELETE FROM seen WHERE (tenant, run_name, input_id) = (SELECT tenant, run_name, input_id FROM inbox WHERE id = ?1)
		AND input = ?1`, input)
	if err == nil && n == 0 { // before schema 2 an id was known by its content alone
		var a arrival
		err = tx.Get(ctx, "SELECT tenant, run_name, input_id, agent, type, data FROM inbox WHERE id = ?", []any{input}, &a.tenant, &a.run, &a.id, &a.agent, &a.typ, &a.data)
		if err == nil {
			_, _, err = tx.Exec(ctx, "DELETE FROM seen WHERE tenant = ? AND run_name = ? AND input_id = ? AND input IS NULL AND hash = ?", a.tenant, a.run, a.id, a.hash())
		}
	}
	if err != nil {
		return fmt.Errorf("forget input of an abandoned step: %w", err)
	}
	return nil
}

// touched is an inbox row, its run, and the step at its other end; branch 0: none.
type touched struct{ id, run, dueUS, branch, step int64 }

func trace(ctx context.Context, tx *sqlite.Tx, query string, args ...any) (list []touched, err error) {
	rows, err := tx.Query(ctx, query, args...)
	if err != nil {
		return nil, fmt.Errorf("trace inputs: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var t touched
		if err := rows.Scan(&t.id, &t.run, &t.dueUS, &t.branch, &t.step); err != nil {
			return nil, fmt.Errorf("trace inputs: %w", err)
		}
		list = append(list, t)
	}
	return list, rows.Err()
}
