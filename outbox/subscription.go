package outbox

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"postrider/internal/sqlite"
)

// Subscribing records, before a SUBSCRIBE, the filters that a broker's kept session of this node's inputs is told to take,
// and returns those that it was told before and that are not among them: they must be unsubscribed, or what comes on them
// would come for ever. granted says that the session has all of filters, if the broker still has it. A process may end at
// any point: the record always holds at least what the session does.
func (o *Outbox) Subscribing(ctx context.Context, broker string, filters []string) (dropped []string, granted bool, err error) {
	err = o.store.Write(ctx, func(ctx context.Context, tx *sqlite.Tx) error {
		for _, f := range filters {
			if _, _, err := tx.Exec(ctx, "INSERT INTO subscription (broker, filter) VALUES (?, ?) ON CONFLICT DO NOTHING", broker, f); err != nil {
				return fmt.Errorf("record subscription to %s: %w", f, err)
			}
		}
		dropped, granted, err = subscriptions(ctx, tx, broker, filters)
		return err
	})
	if err != nil {
		return nil, false, err
	}
	return dropped, granted, nil
}

func subscriptions(ctx context.Context, tx *sqlite.Tx, broker string, wanted []string) (dropped []string, granted bool, err error) {
	rows, err := tx.Query(ctx, "SELECT filter, granted FROM subscription WHERE broker = ? ORDER BY filter", broker)
	if err != nil {
		return nil, false, fmt.Errorf("list subscriptions: %w", err)
	}
	defer rows.Close()
	granted = true
	for rows.Next() {
		var f string
		var g bool
		if err := rows.Scan(&f, &g); err != nil {
			return nil, false, fmt.Errorf("list subscriptions: %w", err)
		}
		if slices.Contains(wanted, f) {
			granted = granted && g
		} else {
			dropped = append(dropped, f)
		}
	}
	if err := errors.Join(rows.Err(), rows.Close()); err != nil {
		return nil, false, fmt.Errorf("list subscriptions: %w", err)
	}
	return dropped, granted, nil
}

// Connecting forgets, before a CONNECT, that the broker's session has any filter: it may be lost, and the CONNECT make an
// empty one in its place, whoever ends before a SUBACK.
func (o *Outbox) Connecting(ctx context.Context, broker string) error {
	return o.store.Write(ctx, func(ctx context.Context, tx *sqlite.Tx) error {
		if _, _, err := tx.Exec(ctx, "UPDATE subscription SET granted = 0 WHERE broker = ? AND granted = 1", broker); err != nil {
			return fmt.Errorf("record connection to %s: %w", broker, err)
		}
		return nil
	})
}

// Subscribed records that the broker's session has filters: their SUBACK came, or it had them and was found again.
func (o *Outbox) Subscribed(ctx context.Context, broker string, filters []string) error {
	return o.each(ctx, "UPDATE subscription SET granted = 1 WHERE broker = ? AND filter = ?", broker, filters)
}

// Unsubscribed forgets filters, after the UNSUBACK or when the broker has no session.
func (o *Outbox) Unsubscribed(ctx context.Context, broker string, filters []string) error {
	return o.each(ctx, "DELETE FROM subscription WHERE broker = ? AND filter = ?", broker, filters)
}

func (o *Outbox) each(ctx context.Context, query, broker string, filters []string) error {
	return o.store.Write(ctx, func(ctx context.Context, tx *sqlite.Tx) error {
		for _, f := range filters {
			if _, _, err := tx.Exec(ctx, query, broker, f); err != nil {
				return fmt.Errorf("record subscription to %s: %w", f, err)
			}
		}
		return nil
	})
}
