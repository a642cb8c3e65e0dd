package outbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"postrider/internal/record"
	"postrider/internal/sqlite"
)

// Reship makes pending again what was shipped and did not arrive at a consumer that this process owns: in each branch,
// everything from the first event after the last that held knows of. It is for a broker that keeps nothing over a
// restart (`postrider dev`) and is called before a relay starts. Returns how many records are pending again.
func (o *Outbox) Reship(ctx context.Context, held func(ctx context.Context, key record.BranchKey) (lsn int64, err error)) (records int64, err error) {
	type shipped struct {
		id, lsn, fork int64
		key           record.BranchKey
	}
	rows, err := o.store.Reader().QueryContext(ctx, `SELECT b.id, b.shipped, b.fork_lsn, b.tenant, r.name, b.ulid
		FROM branch b JOIN run r ON r.id = b.run WHERE b.shipped > b.fork_lsn`)
	if err != nil {
		return 0, fmt.Errorf("list shipped branches: %w", err)
	}
	defer rows.Close()
	var list []shipped
	for rows.Next() {
		var s shipped
		if err := rows.Scan(&s.id, &s.lsn, &s.fork, &s.key.Tenant, &s.key.Run, &s.key.Branch); err != nil {
			return 0, fmt.Errorf("list shipped branches: %w", err)
		}
		list = append(list, s)
	}
	if err := errors.Join(rows.Err(), rows.Close()); err != nil {
		return 0, fmt.Errorf("list shipped branches: %w", err)
	}
	for _, s := range list {
		at, err := held(ctx, s.key)
		if err != nil {
			return records, fmt.Errorf("ask what arrived of branch %s: %w", s.key.Branch, err)
		}
		if at >= s.lsn {
			continue
		}
		var n int64
		err = o.store.Write(ctx, func(ctx context.Context, tx *sqlite.Tx) error {
			n = 0
			var first, id, bytes, recorded int64
			err := tx.Get(ctx, `WITH RECURSIVE walk (id, prev_id, lsn) AS (
				SELECT o.id, o.prev_id, o.lsn FROM outbox o JOIN branch b ON o.id = b.tail_id WHERE b.id = ?1
				UNION ALL SELECT o.id, o.prev_id, o.lsn FROM walk w JOIN outbox o ON o.id = w.prev_id WHERE w.lsn > ?2 + 1)
				SELECT o.lsn, o.id, COALESCE(p.bytes, 0), COALESCE(p.recorded_us, 0) FROM walk w JOIN outbox o ON o.id = w.id LEFT JOIN outbox p ON p.id = o.prev_id
				WHERE w.lsn > ?2 AND w.lsn <= ?3 AND o.kind = 1 ORDER BY w.lsn LIMIT 1`, []any{s.id, max(at, s.fork), s.lsn}, &first, &id, &bytes, &recorded)
			if errors.Is(err, sql.ErrNoRows) {
				return nil // only commands and messages: nobody here counts those
			}
			if err != nil {
				return fmt.Errorf("find first missing event of branch %s: %w", s.key.Branch, err)
			}
			n = s.lsn - first + 1
			_, _, err = tx.Exec(ctx, `UPDATE branch SET shipped = ?, shipped_bytes = ?, shipped_us = iif(? = 0, opened_us, ?), backlog_id = ? WHERE id = ? AND shipped = ?`,
				first-1, bytes, recorded, recorded, id, s.id, s.lsn)
			return err
		})
		if err != nil {
			return records, err
		}
		records += n
	}
	return records, nil
}
