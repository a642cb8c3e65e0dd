package executor

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"postrider/internal/record"
	"postrider/internal/sqlite"
)

// handedOver is the outcome of an input that left for another node, in inbox and seen.
const handedOver = "handed-over"

// lookUp says whether the explicit id of an input is new in its run. What was handed over to another node and comes back
// is: it has more hops than when it was here. ErrConflict: the id stands for other content.
func lookUp(ctx context.Context, tx *sqlite.Tx, a arrival) (fresh bool, err error) {
	if !a.explicit {
		return true, nil
	}
	var hash []byte
	var hops int64
	var outcome string
	var elsewhere bool
	err = tx.Get(ctx, `SELECT s.hash, s.hops, COALESCE(s.outcome, ''), i.id IS NOT NULL AND NULLIF(i.node, m.node) IS NOT NULLIF(NULLIF(?4, ''), m.node)
		FROM seen s JOIN meta m ON m.id = 1 LEFT JOIN inbox i ON i.id = s.input WHERE s.tenant = ?1 AND s.run_name = ?2 AND s.input_id = ?3`,
		[]any{a.tenant, a.run, a.id, a.node}, &hash, &hops, &outcome, &elsewhere)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("look up input %s: %w", a.id, err)
	case string(hash) != string(a.hash()):
		return false, fmt.Errorf("%w: input id %q of run %s was used for other content", ErrConflict, a.id, a.run)
	case outcome == handedOver && a.hops > hops:
		return true, nil
	case elsewhere:
		return false, fmt.Errorf("%w: input id %q of run %s was used for another node", ErrConflict, a.id, a.run)
	}
	return false, nil
}

// remember notes the id of an input that the same transaction stored as row, or, with outcome handed-over, has leave.
// Other content keeps an id that it has.
func remember(ctx context.Context, tx *sqlite.Tx, a arrival, row int64, outcome string) error {
	if !a.explicit && outcome == "" {
		return nil // nobody can send it again
	}
	_, _, err := tx.Exec(ctx, `INSERT INTO seen (tenant, run_name, input_id, hash, input, hops, outcome, at_us)
		VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8 - (SELECT skip_us FROM meta WHERE id = 1))
		ON CONFLICT DO UPDATE SET input = ?5, hops = ?6, outcome = ?7, at_us = excluded.at_us WHERE hash = ?4`,
		a.tenant, a.run, a.id, a.hash(), row, a.hops, optional(outcome), tx.SteadyUS)
	if err != nil {
		return fmt.Errorf("remember input %s: %w", a.id, err)
	}
	return nil
}

const (
	purgeBatch = 200         // ids looked at in one transaction: a purge must not hold up steps
	purgeEvery = time.Minute // when there was nothing more
)

// purgeSeen forgets ids that are older than the window, a batch at a time, and says whether there may be more. Those of
// inputs that still wait get another window.
func purgeSeen(ctx context.Context, store *sqlite.Store, window time.Duration) (more bool, err error) {
	// Looked for outside the transaction: mostly there is nothing.
	var old int
	before := store.SteadyUS() - window.Microseconds()
	err = store.Get(ctx, "SELECT 1 FROM seen WHERE at_us < ? - (SELECT skip_us FROM meta WHERE id = 1) LIMIT 1", []any{before}, &old)
	if errors.Is(err, sql.ErrNoRows) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look for old input ids: %w", err)
	}
	err = store.Write(ctx, func(ctx context.Context, tx *sqlite.Tx) error {
		more = false
		waits, _, err := tx.Exec(ctx, `UPDATE seen SET at_us = ?1 - (SELECT skip_us FROM meta WHERE id = 1) WHERE (tenant, run_name, input_id) IN (
			SELECT s.tenant, s.run_name, s.input_id FROM (`+oldSeen+`) s
			WHERE EXISTS (SELECT 1 FROM inbox i WHERE i.id = s.input `+andPending+`)
			OR s.input IS NULL AND EXISTS (SELECT 1 FROM run r JOIN inbox i ON i.run = r.id WHERE r.tenant = s.tenant AND r.name = s.run_name AND i.input_id = s.input_id `+andPending+`))`,
			tx.SteadyUS, window.Microseconds(), purgeBatch)
		if err != nil {
			return fmt.Errorf("keep ids of inputs that wait: %w", err)
		}
		gone, _, err := tx.Exec(ctx, "DELETE FROM seen WHERE (tenant, run_name, input_id) IN (SELECT tenant, run_name, input_id FROM ("+oldSeen+"))",
			tx.SteadyUS, window.Microseconds(), purgeBatch)
		if err != nil {
			return fmt.Errorf("forget old input ids: %w", err)
		}
		more = waits+gone >= purgeBatch
		return nil
	})
	return more, err
}

// oldSeen is the ?3 oldest ids of more than ?2 microseconds at steady time ?1, by index seen_age.
const oldSeen = `SELECT tenant, run_name, input_id, input FROM seen WHERE at_us < ?1 - ?2 - (SELECT skip_us FROM meta WHERE id = 1) ORDER BY at_us LIMIT ?3`

const andPending = "AND i.consumed_branch IS NULL AND i.cancelled_branch IS NULL AND i.ended_us IS NULL"

// noteLSN notes a record of another node, and says whether it is the first time. Neighbours become one range.
func noteLSN(ctx context.Context, tx *sqlite.Tx, node string, key record.BranchKey, lsn int64) (fresh bool, err error) {
	var lo, hi, next int64
	of := []any{node, key.Tenant, key.Run, key.Branch, lsn}
	err = tx.Get(ctx, `SELECT lo, hi FROM seen_lsn WHERE node = ? AND tenant = ? AND run_name = ? AND branch = ? AND lo <= ? ORDER BY lo DESC LIMIT 1`, of, &lo, &hi)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return false, fmt.Errorf("look up record %d of %s: %w", lsn, key.Branch, err)
	}
	if hi >= lsn {
		return false, nil
	}
	err = tx.Get(ctx, "DELETE FROM seen_lsn WHERE node = ? AND tenant = ? AND run_name = ? AND branch = ? AND lo = ? + 1 RETURNING hi", of, &next)
	if errors.Is(err, sql.ErrNoRows) {
		err, next = nil, lsn
	}
	switch {
	case err != nil:
	case hi == lsn-1 && lo > 0:
		_, _, err = tx.Exec(ctx, "UPDATE seen_lsn SET hi = ?6 WHERE node = ?1 AND tenant = ?2 AND run_name = ?3 AND branch = ?4 AND lo = ?5", node, key.Tenant, key.Run, key.Branch, lo, next)
	default:
		_, _, err = tx.Exec(ctx, "INSERT INTO seen_lsn (node, tenant, run_name, branch, lo, hi) VALUES (?, ?, ?, ?, ?, ?)", append(of, next)...)
	}
	if err != nil {
		return false, fmt.Errorf("remember record %d of %s: %w", lsn, key.Branch, err)
	}
	return true, nil
}
