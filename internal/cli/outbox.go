package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"postrider/executor"
	"postrider/internal/sqlite"
	"postrider/outbox"
)

// Outbox is `outbox`.
func (a *App) Outbox() *cobra.Command {
	return a.group(&cobra.Command{
		Use:     "outbox",
		Short:   "Look at the records and at what waits to be shipped",
		Example: "  postrider outbox ls\n  postrider outbox stats -o json",
	}, a.outboxLs(), a.outboxStats())
}

// kinds are all kinds of records.
var kinds = []string{"event", "command", "message"}

// maxListed bounds --limit: what is listed is held in memory, and read in one snapshot.
const maxListed = 10_000

func (a *App) outboxLs() *cobra.Command {
	f := outbox.Filter{Limit: 100}
	c := &cobra.Command{
		Use:   "ls",
		Short: "List records in order of commit, those that are not shipped",
		Long: `List records in the order in which they were committed. States are pending (waits for the broker's confirmation), withheld
(a rewind keeps it back), dead, expired (too late to be sent) and shipped. All but the shipped ones are listed, unless
--state says otherwise.

The first pending record of a branch, for which the others of the branch wait, has in its row what it waits for: how
often it was sent without a confirmation, the last error, when it is tried next.`,
		Example: "  postrider outbox ls\n" +
			"  postrider outbox ls --run run-1 --state all\n" +
			"  postrider outbox ls --tenant '' --state dead --state expired --kind message -o jsonl",
		Args: a.noArgs,
	}
	c.Flags().StringArrayVar(&f.States, "state", nil, "only records in this `STATE`, or all; may be repeated (default all but shipped)")
	c.Flags().StringVar(&f.Run, "run", "", "only records of this `RUN`")
	c.Flags().StringVar(&f.Kind, "kind", "", "only records of this `KIND`: event, command or message")
	c.Flags().StringVar(&f.Type, "type", "", "only records of this `TYPE`")
	c.Flags().IntVar(&f.Limit, "limit", f.Limit, fmt.Sprintf("at most `N` records, up to %d", maxListed))
	c.Flags().Int64Var(&f.After, "after", 0, "only records after the one with this `ID`")
	c.RunE = func(c *cobra.Command, _ []string) error {
		switch {
		case f.Kind != "" && !slices.Contains(kinds, f.Kind):
			return Usagef("--kind: %q is not event, command or message", f.Kind)
		case f.Limit < 1 || f.Limit > maxListed:
			return Usagef("--limit: %d is not 1 to %d", f.Limit, maxListed)
		case f.After < 0:
			return Usagef("--after: %d is negative", f.After)
		}
		for _, s := range f.States {
			if s != "all" && !slices.Contains(outbox.States, s) {
				return Usagef("--state: %q is not %s or all", s, strings.Join(outbox.States, ", "))
			}
		}
		if len(f.States) == 0 {
			f.States = slices.DeleteFunc(slices.Clone(outbox.States), func(s string) bool { return s == "shipped" })
		} else if slices.Contains(f.States, "all") {
			f.States = outbox.States
		}
		f.Tenant = a.tenant
		return a.withNode(c, true, func(ctx context.Context, store *sqlite.Store) error { return a.listRecords(ctx, store, f) })
	}
	return c
}

func (a *App) listRecords(ctx context.Context, store *sqlite.Store, f outbox.Filter) error {
	records, more, err := outbox.New(store, "").List(ctx, f)
	if err != nil {
		return err
	}
	if len(records) == 0 && f.Run != "" && f.Tenant != "" { // is there nothing to list, or no such run?
		if _, err := executor.TailFrom(ctx, store, f.Tenant, f.Run, 0); err != nil {
			return noRun(err)
		}
	}
	out := list{app: a}
	var rows [][]string
	why := slices.ContainsFunc(records, func(r outbox.Listed) bool { return r.LastError != "" || r.Deliveries > 0 })
	for _, r := range records {
		if a.output == "table" {
			row := []string{number(r.ID), r.Tenant, r.Run, r.Branch, number(r.LSN), r.Kind, r.Type, cut(r.Destination, 120), r.State, stamp(r.RecordedUS),
				number(r.Bytes)}
			if why {
				row = append(row, number(r.Deliveries), stamp(r.NextUS), cut(r.LastError, 200))
			}
			rows = append(rows, row)
			continue
		}
		err := out.add(object("id", r.ID, "tenant", r.Tenant, "run", r.Run, "branch", r.Branch, "gen", r.Gen, "lsn", r.LSN, "step", r.Step, "kind", r.Kind,
			"type", r.Type, "destination", r.Destination, "state", r.State, "recorded_at", stampOrNull(r.RecordedUS), "data_bytes", r.Bytes,
			"deliveries", r.Deliveries, "last_error", r.LastError, "next_try_at", stampOrNull(r.NextUS)))
		if err != nil {
			return err
		}
	}
	if a.output == "table" {
		head := []string{"ID", "TENANT", "RUN", "BRANCH", "LSN", "KIND", "TYPE", "DESTINATION", "STATE", "RECORDED", "DATA BYTES"}
		if why {
			head = append(head, "DELIVERIES", "NEXT TRY", "LAST ERROR")
		}
		err = a.table(head, rows)
	} else {
		err = out.end()
	}
	if err == nil && more {
		fmt.Fprintf(a.Stderr, "there are more: --after %d lists them\n", records[len(records)-1].ID)
	}
	return err
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
