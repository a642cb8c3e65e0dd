package cli

import (
	"context"

	"github.com/spf13/cobra"

	"postrider/internal/sqlite"
	"postrider/outbox"
)

// Outbox is `outbox`.
func (a *App) Outbox() *cobra.Command {
	return a.group(&cobra.Command{
		Use:     "outbox",
		Short:   "Look at what waits to be shipped",
		Example: "  postrider outbox stats -o json",
	}, a.outboxStats())
}

func (a *App) outboxStats() *cobra.Command {
	return &cobra.Command{
		Use:     "stats",
		Short:   "Count the records by what became of them",
		Example: "  postrider outbox stats\n  postrider outbox stats --tenant '' -o json",
		Args:    a.noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.withNode(c, true, func(ctx context.Context, store *sqlite.Store) error {
				node, err := sqlite.ReadNode(ctx, store)
				if err != nil {
					return err
				}
				s, err := outbox.New(store, node.Name).Stats(ctx, a.tenant)
				if err != nil {
					return err
				}
				if a.output != "table" {
					return a.printJSON(object("pending", s.Pending, "pending_bytes", s.PendingBytes, "shipped", s.Shipped, "withheld", s.Withheld,
						"dead", s.Dead, "expired", s.Expired, "oldest_pending_at", stampOrNull(s.OldestUS)))
				}
				return a.table([]string{"PENDING", "PENDING BYTES", "SHIPPED", "WITHHELD", "DEAD", "EXPIRED", "OLDEST PENDING"},
					[][]string{{number(s.Pending), number(s.PendingBytes), number(s.Shipped), number(s.Withheld), number(s.Dead), number(s.Expired),
						stamp(s.OldestUS)}})
			})
		},
	}
}
