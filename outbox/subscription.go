package outbox

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"postrider/internal/sqlite"
)

// Subscribing records, before a SUBSCRIBE, the filters that the broker's kept session of this node's inputs is told to take,
// and returns those that it was told before and that are not among them: they must be unsubscribed, or what comes on them
// would come for ever. A process may end at any point: the record always holds at least what the session does.
func (o *Outbox) Subscribing(ctx context.Context, filters []string) (dropped []string, err error) {
	err = o.store.Write(ctx, func(ctx context.Context, tx *sqlite.Tx) error {
		for _, f := range filters {
			if _, _, err := tx.Exec(ctx, "INSERT INTO subscription (filter) VALUES (?) ON CONFLICT DO NOTHING", f); err != nil {
				return fmt.Errorf("record subscription to %s: %w", f, err)
			}
		}
		all, err := subscriptions(ctx, tx)
		if err != nil {
			return err
		}
		dropped = slices.DeleteFunc(all, func(f string) bool { return slices.Contains(filters, f) })
		return nil
	})
	if err != nil {
		return nil, err
	}
	return dropped, nil
}

func subscriptions(ctx context.Context, tx *sqlite.Tx) (filters []string, err error) {
	rows, err := tx.Query(ctx, "SELECT filter FROM subscription ORDER BY filter")
	if err != nil {
		return nil, fmt.Errorf("list subscriptions: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var f string
		if err := rows.Scan(&f); err != nil {
			return nil, fmt.Errorf("list subscriptions: %w", err)
		}
		filters = append(filters, f)
	}
	if err := errors.Join(rows.Err(), rows.Close()); err != nil {
		return nil, fmt.Errorf("list subscriptions: %w", err)
	}
	return filters, nil
}

// Unsubscribed forgets filters, after the UNSUBACK or when the broker has no session.
func (o *Outbox) Unsubscribed(ctx context.Context, filters []string) error {
	return o.store.Write(ctx, func(ctx context.Context, tx *sqlite.Tx) error {
		for _, f := range filters {
			if _, _, err := tx.Exec(ctx, "DELETE FROM subscription WHERE filter = ?", f); err != nil {
				return fmt.Errorf("forget subscription to %s: %w", f, err)
			}
		}
		return nil
	})
}
