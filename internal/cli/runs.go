package cli

import (
	"context"
	"errors"
	"fmt"
	"regexp"

	"github.com/spf13/cobra"

	"postrider/executor"
	"postrider/internal/sqlite"
)

// Runs is `runs`; untilSignal gives tail, which goes on until it is told to end, an orderly end.
func (a *App) Runs(untilSignal func(func(context.Context, Tail) error) func(context.Context, Tail) error) *cobra.Command {
	return a.group(&cobra.Command{
		Use:     "runs",
		Short:   "Look at runs, and have those that stopped go on",
		Example: "  postrider runs ls\n  postrider runs show run-1 -o json\n  postrider runs tail run-1\n  postrider runs resume run-1",
	}, a.runsLs(), a.runsShow(), a.runsSteps(), a.runsTail(untilSignal(a.tail)), a.runsResume(), a.runsReopen())
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
		Use:   "show RUN",
		Short: "Show a run: what it does, its state, its branches, its last steps",
		Long: `Show what a run does, its state, its branches, and its last ten steps as a chain: what went in (in), and what came of it,
records that leave by MQTT and inputs of runs of this node (to). CORRELATION is the same for all that goes back to one
input, on every node; CAUSATION is the input, or BRANCH/STEP the step, that something came of.`,
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
				links, err := executor.Chain(ctx, store, a.tenant, given[0], chainSteps)
				if err != nil {
					return noRun(err)
				}
				if a.output != "table" {
					return a.printJSON(object("tenant", d.Tenant, "run", d.Run, "agent", d.Agent, "status", d.Status, "branch", d.Branch,
						"step", d.Step, "lsn", d.LSN, "state", raw(d.State), "branches", d.Branches, "chain", chainJSON(links),
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
				if err := a.table([]string{"BRANCH", "GEN", "PARENT", "FORK STEP", "FORK LSN", "STEP", "LSN", "SHIPPED", "LIVE"}, rows); err != nil {
					return err
				}
				if err := a.blank(); err != nil {
					return err
				}
				return a.table([]string{"STEP", "IN OR TO", "LSN", "KIND", "TYPE", "ID", "FROM OR TO", "STATE", "CORRELATION", "CAUSATION"}, chainRows(links))
			})
		},
	}
}

const (
	chainSteps = 10 // that runs show shows
	chainWidth = 20 // of what came of one step; -o json has all
)

// chainRows are the steps, each with what went in and what came of it.
func chainRows(links []executor.Link) (rows [][]string) {
	for i := range links {
		l := &links[i]
		step := number(l.Step)
		if in := l.In; in != nil {
			rows = append(rows, []string{step, "in", "", "input", in.Type, cut(in.ID, 80), cut(in.Source, 120), "", cut(in.Correlation, 80), cut(in.Causation, 80)})
		} else {
			rows = append(rows, []string{step, "in", "", "", "", "", "", "", "", ""})
		}
		var to [][]string
		for j := range l.Records {
			r := &l.Records[j]
			to = append(to, []string{step, "to", number(r.LSN), r.Kind, r.Type, cut(r.InputID, 80), cut(where(r), 120), r.State, cut(r.Correlation, 80), cut(r.Causation, 80)})
		}
		for j := range l.Commands {
			c := &l.Commands[j]
			to = append(to, []string{step, "to", "", "input", c.Type, cut(c.ID, 80), c.Agent + " " + c.Run, c.State, cut(c.Correlation, 80), cut(c.Causation, 80)})
		}
		if n := len(to); n > chainWidth {
			to = append(to[:chainWidth], []string{step, "to", "", fmt.Sprintf("and %d more", n-chainWidth), "", "", "", "", "", ""})
		}
		rows = append(rows, to...)
	}
	return rows
}

// chainJSON is the same for runs show -o json.
func chainJSON(links []executor.Link) raw {
	all := make([][]byte, len(links))
	for i := range links {
		l := &links[i]
		input := raw("null")
		if in := l.In; in != nil {
			input = object("n", in.Row, "id", in.ID, "type", in.Type, "source", in.Source, "correlation", in.Correlation, "causation", in.Causation, "traceparent", in.Trace)
		}
		records, inputs := make([][]byte, len(l.Records)), make([][]byte, len(l.Commands))
		for j := range l.Records {
			r := &l.Records[j]
			records[j] = object("lsn", r.LSN, "kind", r.Kind, "type", r.Type, "destination", r.Destination, "run", r.Run, "input_id", r.InputID, "state", r.State,
				"correlation", r.Correlation, "causation", r.Causation, "traceparent", r.Trace)
		}
		for j := range l.Commands {
			c := &l.Commands[j]
			inputs[j] = object("n", c.Row, "agent", c.Agent, "node", c.Node, "run", c.Run, "id", c.ID, "type", c.Type, "state", c.State,
				"correlation", c.Correlation, "causation", c.Causation, "traceparent", c.Trace)
		}
		all[i] = object("branch", l.Branch, "step", l.Step, "next", l.Next, "lsn", l.LSN, "committed_at", stampOrNull(l.CommittedUS),
			"input", input, "records", array(records), "inputs", array(inputs))
	}
	return array(all)
}

// goOn is a command that has a run go on which stopped.
func (a *App) goOn(name, short, long, example string, do func(context.Context, *sqlite.Store, string, string, string) (executor.Resumed, error),
	hint string, statuses ...string) *cobra.Command {
	var reason string
	c := &cobra.Command{
		Use:               name + " RUN",
		Short:             short,
		Long:              long,
		Example:           example,
		Args:              args(1, "RUN"),
		ValidArgsFunction: a.completeRunIn(statuses...),
	}
	c.Flags().StringVar(&reason, "reason", "", "`TEXT` that is exported with it, and kept")
	c.RunE = func(c *cobra.Command, given []string) error {
		if err := a.oneTenant(); err != nil {
			return err
		}
		return a.withNode(c, false, func(ctx context.Context, store *sqlite.Store) error {
			out, err := do(ctx, store, a.tenant, given[0], reason)
			if errors.Is(err, executor.ErrConflict) {
				return WithHint(err, hint, given[0])
			}
			if err != nil {
				return noRun(err)
			}
			if a.output != "table" {
				return a.printJSON(appendJSON(nil, out))
			}
			return a.fields("tenant", out.Tenant, "run", out.Run, "was", out.Was, "branch", out.Branch, "step", number(out.Step), "lsn", number(out.LSN))
		})
	}
	return c
}

func (a *App) runsResume() *cobra.Command {
	return a.goOn("resume", "Have a paused run go on", `Have a paused run go on with what it stopped at, with all attempts again; the reason why it stopped is in runs show. The node
may be running. To go on without the input that the run is paused at, drop it: postrider inbox drop N.`,
		"  postrider runs resume run-1\n  postrider runs resume run-1 --reason 'disk replaced'", executor.Resume,
		"postrider runs show %s shows what it does", "paused")
}

func (a *App) runsReopen() *cobra.Command {
	return a.goOn("reopen", "Have a run that is done or failed take inputs again", `Have a run that is done or failed take inputs again, beginning with those that it left. The node may be running. Dead
letters that came after its end can be requeued then: postrider inbox dead --run RUN. A rewind to the step that ended the
run ends it again.`,
		"  postrider runs reopen run-1\n  postrider runs reopen run-1 --reason 'customer came back'", executor.Reopen,
		"postrider runs show %s shows what it does; postrider runs resume is for a paused run", "done", "failed")
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
					"started_at", stampOrNull(s.StartedUS), "committed_at", stampOrNull(s.CommittedUS),
					"source", s.InputSource, "correlation", s.Correlation, "causation", s.Causation, "traceparent", s.Trace))
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
