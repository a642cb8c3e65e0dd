package cli

import (
	"context"
	"errors"
	"regexp"

	"github.com/spf13/cobra"

	"postrider/executor"
	"postrider/internal/sqlite"
)

// Runs is `runs`; untilSignal gives tail, which goes on until it is told to end, an orderly end.
func (a *App) Runs(untilSignal func(func(context.Context, Tail) error) func(context.Context, Tail) error) *cobra.Command {
	return a.group(&cobra.Command{
		Use:     "runs",
		Short:   "Look at runs",
		Example: "  postrider runs ls\n  postrider runs show run-1 -o json\n  postrider runs tail run-1",
	}, a.runsLs(), a.runsShow(), a.runsSteps(), a.runsTail(untilSignal(a.tail)))
}

// page is how many rows one look at a database reads.
const page = 1000

func (a *App) runsLs() *cobra.Command {
	return &cobra.Command{
		Use:     "ls",
		Short:   "List the runs, by tenant and name",
		Example: "  postrider runs ls\n  postrider runs ls --tenant '' -o jsonl",
		Args:    a.noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.withNode(c, true, func(ctx context.Context, store *sqlite.Store) error {
				out := list{app: a}
				var tenant, run string
				for {
					runs, err := executor.Runs(ctx, store, a.tenant, tenant, run, page)
					if err != nil {
						return err
					}
					var rows [][]string
					for _, r := range runs {
						if a.output == "table" {
							rows = append(rows, []string{r.Tenant, r.Run, r.Agent, r.Status, number(r.Step), number(r.LSN), number(r.Pending),
								number(r.Dead), stamp(r.UpdatedUS), cut(cause(r.LastError), 120)})
							continue
						}
						err := out.add(object("tenant", r.Tenant, "run", r.Run, "agent", r.Agent, "status", r.Status, "branch", r.Branch, "gen", r.Gen,
							"step", r.Step, "lsn", r.LSN, "pending", r.Pending, "dead", r.Dead, "attempts", r.Attempts, "last_error", r.LastError,
							"wake_at", stampOrNull(r.WakeUS), "updated_at", stampOrNull(r.UpdatedUS)))
						if err != nil {
							return err
						}
					}
					if a.output == "table" && (len(rows) > 0 || tenant == "") {
						if err := a.table([]string{"TENANT", "RUN", "AGENT", "STATUS", "STEP", "LSN", "PENDING", "DEAD", "UPDATED", "LAST ERROR"}, rows); err != nil {
							return err
						}
					}
					if len(runs) < page {
						break
					}
					tenant, run = runs[len(runs)-1].Tenant, runs[len(runs)-1].Run
				}
				if a.output == "table" {
					return nil
				}
				return out.end()
			})
		},
	}
}

// stepOf is how errors of steps begin; a row says that already.
var stepOf = regexp.MustCompile(`^agent [A-Za-z0-9_-]+, step [^ ]+(?: of [^ ]+)?: `)

// cause is the end of an error that tells a reader of a row what is wrong.
func cause(lastError string) string { return stepOf.ReplaceAllString(lastError, "") }

func (a *App) runsShow() *cobra.Command {
	return &cobra.Command{
		Use:               "show RUN",
		Short:             "Show a run: what it does, its state, its branches",
		Example:           "  postrider runs show run-1\n  postrider runs show run-1 -o json | jq .state",
		Args:              args(1, "RUN"),
		ValidArgsFunction: a.completeRun(0),
		RunE: func(c *cobra.Command, given []string) error {
			if err := a.oneTenant(); err != nil {
				return err
			}
			return a.withNode(c, true, func(ctx context.Context, store *sqlite.Store) error {
				d, err := executor.Show(ctx, store, a.tenant, given[0])
				if err != nil {
					return noRun(err)
				}
				if a.output != "table" {
					return a.printJSON(object("tenant", d.Tenant, "run", d.Run, "agent", d.Agent, "status", d.Status, "branch", d.Branch,
						"step", d.Step, "lsn", d.LSN, "state", raw(d.State), "branches", d.Branches,
						"pending", d.Pending, "dead", d.Dead, "attempts", d.Attempts, "last_error", d.LastError, "wake_at", stampOrNull(d.WakeUS)))
				}
				pairs := []string{"tenant", d.Tenant, "run", d.Run, "agent", d.Agent, "status", d.Status, "branch", d.Branch,
					"step", number(d.Step), "lsn", number(d.LSN), "pending", number(d.Pending), "dead", number(d.Dead)}
				if d.LastError != "" {
					pairs = append(pairs, "attempts", number(d.Attempts), "last error", cut(d.LastError, 1000))
				}
				if d.WakeUS != 0 {
					pairs = append(pairs, "wakes", stamp(d.WakeUS))
				}
				if err := a.fields(append(pairs, "state", cut(string(d.State), 2000))...); err != nil {
					return err
				}
				if err := a.blank(); err != nil {
					return err
				}
				rows := make([][]string, len(d.Branches))
				for i, b := range d.Branches {
					rows[i] = []string{b.Branch, number(b.Gen), b.Parent, number(b.ForkStep), number(b.ForkLSN), number(b.Step), number(b.LSN),
						number(b.Shipped), yesNo(b.Live)}
				}
				return a.table([]string{"BRANCH", "GEN", "PARENT", "FORK STEP", "FORK LSN", "STEP", "LSN", "SHIPPED", "LIVE"}, rows)
			})
		},
	}
}

func (a *App) runsSteps() *cobra.Command {
	var limit int
	var before int64
	c := &cobra.Command{
		Use:               "steps RUN",
		Short:             "List the steps of a run's live lineage, newest first",
		Example:           "  postrider runs steps run-1\n  postrider runs steps run-1 --before 100 --limit 20 -o jsonl",
		Args:              args(1, "RUN"),
		ValidArgsFunction: a.completeRun(0),
	}
	c.Flags().IntVar(&limit, "limit", 50, "at most `N` steps")
	c.Flags().Int64Var(&before, "before", 0, "only steps before `STEP` (default from the newest)")
	c.RunE = func(c *cobra.Command, given []string) error {
		if err := a.oneTenant(); err != nil {
			return err
		}
		if limit < 1 || before < 0 {
			return Usagef("--limit is at least 1, and --before not negative")
		}
		return a.withNode(c, true, func(ctx context.Context, store *sqlite.Store) error {
			steps, err := executor.Steps(ctx, store, a.tenant, given[0], before, limit)
			if err != nil {
				return noRun(err)
			}
			out := list{app: a}
			var rows [][]string
			for _, s := range steps {
				if a.output == "table" {
					rows = append(rows, []string{number(s.Step), s.Branch, s.Input, s.InputType, number(s.LSN), s.Next, stamp(s.CommittedUS)})
					continue
				}
				err := out.add(object("branch", s.Branch, "step", s.Step, "input", s.Input, "input_type", s.InputType, "lsn", s.LSN, "next", s.Next,
					"started_at", stampOrNull(s.StartedUS), "committed_at", stampOrNull(s.CommittedUS)))
				if err != nil {
					return err
				}
			}
			if a.output == "table" {
				return a.table([]string{"STEP", "BRANCH", "INPUT", "TYPE", "LSN", "NEXT", "COMMITTED"}, rows)
			}
			return out.end()
		})
	}
	return c
}

func noRun(err error) error {
	if errors.Is(err, executor.ErrNotFound) {
		return WithHint(err, "postrider runs ls --tenant '' lists the runs of a database")
	}
	return err
}
