package demo

import (
	"context"
	"errors"
	"fmt"

	"postrider/fold"
	"postrider/internal/record"
	"postrider/internal/sqlite"
)

// rules ask the node's database for what must not be there once every run has worked off its inputs; a row is a finding.
// All inputs came from outside, and a rewind does not give such inputs again: one that an abandoned step consumed stays
// consumed, so that each input belongs to exactly one step, abandoned or not.
var rules = []string{
	// The LSNs of a branch are dense from its fork on, in the order of commit, …
	`SELECT format('record %d of %s (branch %s) comes next after record %d', lsn, run, ulid, before) FROM (
		SELECT o.id, o.lsn, r.name AS run, b.ulid, lag(o.lsn, 1, b.fork_lsn) OVER (PARTITION BY o.branch ORDER BY o.id) AS before
		FROM outbox o JOIN branch b ON b.id = o.branch JOIN run r ON r.id = b.run)
	WHERE lsn <> before + 1 ORDER BY id`,

	// … up to its head.
	`SELECT format('%s (branch %s) has %d records and counts %d', r.name, b.ulid, count(o.id), b.head_lsn - b.fork_lsn)
	FROM branch b JOIN run r ON r.id = b.run LEFT JOIN outbox o ON o.branch = b.id
	GROUP BY b.id HAVING count(o.id) <> b.head_lsn - b.fork_lsn`,

	// A step has its record.
	`SELECT format('step %d of %s (branch %s) has no record', c.step, r.name, b.ulid)
	FROM checkpoint c JOIN branch b ON b.id = c.branch JOIN run r ON r.id = b.run
	WHERE (c.branch, c.lsn, c.step) NOT IN (SELECT branch, lsn, step FROM outbox) ORDER BY c.id`,

	// A step consumed an input, …
	`SELECT format('step %d of %s (branch %s) consumed no input', c.step, r.name, b.ulid)
	FROM checkpoint c JOIN branch b ON b.id = c.branch JOIN run r ON r.id = b.run
	WHERE c.step > 0 AND NOT EXISTS (SELECT 1 FROM inbox i WHERE i.id = c.input AND i.run = r.id) ORDER BY c.id`,

	// … and an input was consumed by one step, the one that its row names.
	`SELECT format('input %s of %s was consumed by %s; its row says %s', i.input_id, i.run_name,
		coalesce('step ' || group_concat(c.step, ' and step '), 'no step'), coalesce('step ' || i.consumed_step, 'none'))
	FROM inbox i LEFT JOIN checkpoint c ON c.input = i.id
	GROUP BY i.id HAVING count(c.id) <> 1 OR max(c.branch) IS NOT i.consumed_branch OR max(c.step) IS NOT i.consumed_step ORDER BY i.id`,

	// None was removed: ids are given once, in a row.
	`SELECT format('%d inputs were accepted, and %d of them are there', s.seq, count(i.id))
	FROM sqlite_sequence s LEFT JOIN inbox i WHERE s.name = 'inbox' GROUP BY s.name HAVING count(i.id) <> s.seq`,
}

// checkNode holds the node's database against the rules.
func (f *Figures) checkNode(ctx context.Context, store *sqlite.Store) error {
	for _, rule := range rules {
		if err := f.findAll(ctx, store, rule); err != nil {
			return err
		}
	}
	return nil
}

func (f *Figures) findAll(ctx context.Context, store *sqlite.Store, rule string) error {
	rows, err := store.Reader().QueryContext(ctx, rule)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var what string
		if err := rows.Scan(&what); err != nil {
			return err
		}
		f.found("%s", what)
	}
	return rows.Err()
}

// head is where a run stands at the node.
type head struct {
	name string
	step int64
}

func heads(ctx context.Context, store *sqlite.Store) (list []head, err error) {
	rows, err := store.Reader().QueryContext(ctx, "SELECT r.name, b.head_step FROM run r JOIN branch b ON b.id = r.live ORDER BY r.name")
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var h head
		if err := rows.Scan(&h.name, &h.step); err != nil {
			return nil, err
		}
		list = append(list, h)
	}
	return list, rows.Err()
}

// checkCount follows each run as the fold shows it: its counter counts 1, 2, … up to the run's last step at the node.
func (f *Figures) checkCount(ctx context.Context, events *fold.Fold, l *ledger) error {
	for _, run := range l.runs {
		shown, err := events.Show(ctx, tenant, run.name, l.node)
		if errors.Is(err, fold.ErrNotFound) {
			shown, err = &fold.Shown{}, nil
		}
		if err != nil {
			return err
		}
		n := int64(0)
		for _, r := range shown.Records {
			if r.Type != "counted" {
				continue
			}
			n++
			if want := fmt.Sprintf(`{"n":%d}`, n); string(r.Data) != want {
				at := place{l.node, record.BranchKey{Tenant: tenant, Run: run.name, Branch: r.Branch}, r.LSN}
				f.found("%s says %.60q and not %q", at, r.Data, want)
				_, _ = fmt.Sscanf(string(r.Data), `{"n":%d}`, &n) // it may go on from there
			}
		}
		if n != run.step {
			f.found("the fold counts to %d in %s, which has %d steps", n, run.name, run.step)
		}
	}
	return nil
}
