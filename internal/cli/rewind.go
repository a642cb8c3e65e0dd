package cli

import (
	"context"
	"errors"

	"github.com/spf13/cobra"

	"postrider/executor"
	"postrider/internal/sqlite"
)

// Rewind is `rewind`.
func (a *App) Rewind() *cobra.Command {
	var to int64
	var reason string
	c := &cobra.Command{
		Use:   "rewind RUN --to STEP",
		Short: "Take a run back to an earlier step",
		Long: `Open a new live branch of a run at a step of its live lineage (0 is the state before the first). A step in progress is
dropped, records after that step which were not shipped are withheld, and what was pending at it is pending again.
Inputs from outside that the abandoned steps consumed are not given again. The node may be running. A rewind to its own
last step sets a paused run going again.`,
		Example:           "  postrider rewind run-1 --to 3\n  postrider rewind run-1 --to 0 --reason 'wrong model'",
		Args:              args(1, "RUN"),
		ValidArgsFunction: a.completeRun(0),
	}
	c.Flags().Int64Var(&to, "to", -1, "`STEP` to go back to (required)")
	c.Flags().Lookup("to").DefValue = "0" // so that none is shown: it must be given
	c.Flags().StringVar(&reason, "reason", "", "`TEXT` that is exported with the new branch")
	c.RunE = func(c *cobra.Command, given []string) error {
		if err := a.oneTenant(); err != nil {
			return err
		}
		hint := func(err error) error {
			return WithHint(err, "postrider runs steps %s lists its steps, postrider runs ls --tenant '' all runs", given[0])
		}
		switch {
		case !c.Flags().Changed("to"):
			return hint(Usagef("--to STEP is missing"))
		case to < 0:
			return hint(Usagef("--to: %d is negative", to))
		}
		return a.withNode(c, false, func(ctx context.Context, store *sqlite.Store) error {
			out, err := executor.Rewind(ctx, store, a.tenant, given[0], to, reason)
			if errors.Is(err, executor.ErrNotFound) {
				if _, other := executor.TailFrom(ctx, store, a.tenant, given[0], 0); other != nil { // it is the run that there is not
					return noRun(err)
				}
				return WithHint(err, "postrider runs steps %s lists its steps", given[0])
			}
			if err != nil {
				return err
			}
			if a.output != "table" {
				return a.printJSON(appendJSON(nil, out))
			}
			return a.fields("tenant", out.Tenant, "run", out.Run, "branch", out.Branch, "parent", out.Parent,
				"fork step", number(out.ForkStep), "fork lsn", number(out.ForkLSN),
				"records withheld", number(out.Withheld), "records already shipped", number(out.Shipped),
				"inputs pending again", number(out.Restored), "inputs removed", number(out.Removed))
		})
	}
	return c
}
