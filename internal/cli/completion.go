package cli

import (
	"context"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"postrider/executor"
	"postrider/fold"
	"postrider/internal/sqlite"
	"postrider/outbox"
)

const (
	completionTime = 2 * time.Second // somebody waits with a finger on the key
	completionMost = 200
)

// choices are the values of flags that have few, by the flag's name.
var choices = map[string][]string{
	"output":       {"table", "json", "jsonl"},
	"log-level":    {"debug", "info", "warn", "error"},
	"log-format":   {"text", "json"},
	"on-exhausted": {"pause", "dead-letter"},
	"state":        append(slices.Clone(outbox.States), "all"),
	"kind":         kinds,
}

// completion is `completion`.
func (a *App) completion(root *cobra.Command) *cobra.Command {
	shell := func(name, needs, install string, write func(io.Writer) error) *cobra.Command {
		return &cobra.Command{
			Use:     name,
			Short:   "Print the completion script for " + name,
			Long:    "Print the script that has " + name + " complete commands, flags, agents and runs." + needs,
			Example: install,
			Args:    a.noArgs,
			RunE:    func(*cobra.Command, []string) error { return write(a.Stdout) },
		}
	}
	return a.group(&cobra.Command{
		Use:   "completion",
		Short: "Print a script that has a shell complete commands, flags, agents and runs",
		Example: "  source <(postrider completion bash)\n" +
			"  postrider completion zsh > \"${fpath[1]}/_postrider\"\n" +
			"  postrider completion fish > ~/.config/fish/completions/postrider.fish",
	},
		shell("bash", " It builds on the package bash-completion.", "  source <(postrider completion bash)\n  postrider completion bash > ~/.local/share/bash-completion/completions/postrider",
			func(w io.Writer) error { return root.GenBashCompletionV2(w, true) }),
		shell("zsh", "", "  source <(postrider completion zsh)\n  postrider completion zsh > \"${fpath[1]}/_postrider\"", root.GenZshCompletion),
		shell("fish", "", "  postrider completion fish | source\n  postrider completion fish > ~/.config/fish/completions/postrider.fish",
			func(w io.Writer) error { return root.GenFishCompletion(w, true) }),
	)
}

// settle does for a command and those below it what all have alike: flags are listed in the order in which they were
// declared, and a shell completes the values of those that have few, files for --db, and nothing where nothing is known.
func settle(c *cobra.Command) {
	for _, flags := range []*pflag.FlagSet{c.Flags(), c.PersistentFlags()} {
		flags.SortFlags = false
		flags.VisitAll(func(f *pflag.Flag) {
			offer := cobra.FixedCompletions(choices[f.Name], cobra.ShellCompDirectiveNoFileComp)
			if f.Name == "db" {
				offer = cobra.FixedCompletions(nil, cobra.ShellCompDirectiveDefault)
			}
			if _, own := c.GetFlagCompletionFunc(f.Name); own {
				return
			}
			if err := c.RegisterFlagCompletionFunc(f.Name, offer); err != nil {
				panic(err) // only a flag that does not exist, or twice
			}
		})
	}
	if c.ValidArgsFunction == nil {
		c.ValidArgsFunction = cobra.NoFileCompletions
	}
	for _, sub := range c.Commands() {
		settle(sub)
	}
}

// completing tells a shell's question from a command: nobody reads its stderr.
func completing(c *cobra.Command) bool {
	return c.Name() == cobra.ShellCompRequestCmd || c.Name() == cobra.ShellCompNoDescRequestCmd
}

// completeRun offers runs for the argument that follows before others, of the agent that is the first of them if any.
func (a *App) completeRun(before int) cobra.CompletionFunc {
	return func(c *cobra.Command, given []string, begun string) ([]string, cobra.ShellCompDirective) {
		if len(given) != before {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return a.lookUp(c, func(ctx context.Context, store *sqlite.Store) ([]string, error) {
			return executor.RunNames(ctx, store, a.tenant, strings.Join(given, ""), begun, completionMost)
		})
	}
}

// completeSend offers agents, behind an @ nodes, then the runs of the agent that was chosen.
func (a *App) completeSend(c *cobra.Command, given []string, begun string) ([]string, cobra.ShellCompDirective) {
	if len(given) > 0 {
		return a.completeRun(1)(c, given, begun)
	}
	name, node, remote := strings.Cut(begun, "@")
	if !remote {
		return a.completeAgent(c, nil, begun)
	}
	return a.lookUp(c, func(ctx context.Context, store *sqlite.Store) ([]string, error) {
		nodes, err := executor.NodeNames(ctx, store, node, completionMost)
		for i := range nodes {
			nodes[i] = name + "@" + nodes[i]
		}
		return nodes, err
	})
}

// completeAgent offers agents.
func (a *App) completeAgent(c *cobra.Command, _ []string, begun string) ([]string, cobra.ShellCompDirective) {
	return a.lookUp(c, func(ctx context.Context, store *sqlite.Store) ([]string, error) {
		return executor.AgentNames(ctx, store, begun, completionMost)
	})
}

// completeInput offers the numbers of inputs in some states, with what they are, those that came malformed among them or
// not: they have no id.
func (a *App) completeInput(states []string, malformed bool) cobra.CompletionFunc {
	return func(c *cobra.Command, given []string, begun string) ([]string, cobra.ShellCompDirective) {
		return a.lookUp(c, func(ctx context.Context, store *sqlite.Store) (offers []string, err error) {
			f := executor.InputFilter{Tenant: a.tenant, States: states, Limit: completionMost}
			for more := true; more && len(offers) < completionMost; {
				var inputs []executor.InputInfo
				if inputs, more, err = executor.Inputs(ctx, store, f); err != nil {
					return offers, err
				}
				for _, in := range inputs {
					n := number(in.Row)
					if strings.HasPrefix(n, begun) && !slices.Contains(given, n) && (malformed || in.ID != "") {
						offers = append(offers, n+"\t"+clean(in.State+", "+in.Run+" "+in.ID))
					}
					f.After = in.Row
				}
			}
			return offers, nil
		})
	}
}

// completeRunIn offers runs in one of the statuses.
func (a *App) completeRunIn(statuses ...string) cobra.CompletionFunc {
	return func(c *cobra.Command, given []string, begun string) ([]string, cobra.ShellCompDirective) {
		if len(given) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return a.lookUp(c, func(ctx context.Context, store *sqlite.Store) ([]string, error) {
			return executor.RunNamesIn(ctx, store, a.tenant, statuses, begun, completionMost)
		})
	}
}

// lookUp asks a node's database. Where there is none, or it cannot be read at once, nothing is offered.
func (a *App) lookUp(c *cobra.Command, ask func(ctx context.Context, store *sqlite.Store) ([]string, error)) ([]string, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(context.Background(), completionTime)
	defer cancel()
	if a.environment(c) != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	store, err := sqlite.Open(ctx, a.db, sqlite.NodeSchema(a.Schema, "", a.db), sqlite.Options{ReadOnly: true})
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	defer store.Close()
	names, err := ask(ctx, store)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// completeFolded offers the runs that a fold knows.
func (a *App) completeFolded(c *cobra.Command, given []string, begun string) ([]string, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(context.Background(), completionTime)
	defer cancel()
	if len(given) > 0 || a.environment(c) != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	f, err := fold.Open(ctx, a.foldDB, fold.Options{Store: sqlite.Options{ReadOnly: true}})
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	defer f.Close()
	names, err := f.RunNames(ctx, a.tenant, begun, completionMost)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}
