package cli

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"postrider/executor"
	"postrider/internal/sqlite"
)

// Inbox is `inbox`.
func (a *App) Inbox() *cobra.Command {
	return a.group(&cobra.Command{
		Use:     "inbox",
		Short:   "Look at the inputs, and decide on those that are stuck",
		Example: "  postrider inbox ls\n  postrider inbox dead\n  postrider inbox requeue 17\n  postrider inbox drop --run run-1",
	}, a.inboxLs(), a.inboxDead(), a.inboxRequeue(), a.inboxDrop())
}

func (a *App) inboxLs() *cobra.Command {
	var states []string
	f := executor.InputFilter{}
	c := &cobra.Command{
		Use:   "ls",
		Short: "List inputs in the order in which they are due, those that are not over",
		Long: `List inputs in the order in which they are due. Those that are not over:

  waiting     its time has not come
  pending     due; it waits for its turn, or for what WHY says
  running     in hand
  paused      its run is paused at it
  unhosted    nobody here has its agent
  elsewhere   it belongs to another node, and is about to be handed over

With --state also: dead (set aside after its last attempt), dropped (by an operator), handed-over (to another node),
cancelled (by the agent that sent it), consumed (by a step; listed of one --run). N is what requeue and drop take.`,
		Example: "  postrider inbox ls\n" +
			"  postrider inbox ls --run run-1 --state all\n" +
			"  postrider inbox ls --tenant '' --state paused --state dead -o jsonl",
		Args: a.noArgs,
	}
	c.Flags().StringArrayVar(&states, "state", nil, "only inputs in this `STATE`, or all; may be repeated (default those that are not over)")
	a.inputFlags(c, &f)
	must(c.RegisterFlagCompletionFunc("state", cobra.FixedCompletions(append(slices.Clone(executor.InputStates), "all"), cobra.ShellCompDirectiveNoFileComp)))
	c.RunE = func(c *cobra.Command, _ []string) error {
		for _, s := range states {
			if s != "all" && !slices.Contains(executor.InputStates, s) {
				return Usagef("--state: %q is not %s or all", s, strings.Join(executor.InputStates, ", "))
			}
		}
		switch {
		case len(states) == 0:
			f.States = executor.InputStates[:executor.LiveStates]
		case !slices.Contains(states, "all"):
			f.States = states
		case f.Run != "":
			f.States = executor.InputStates
		default:
			f.States = slices.DeleteFunc(slices.Clone(executor.InputStates), func(s string) bool { return s == executor.InputConsumed })
		}
		if slices.Contains(f.States, executor.InputConsumed) && f.Run == "" {
			return Usagef("--state consumed: --run RUN is missing")
		}
		return a.listInputs(c, f, inboxColumns)
	}
	return c
}

func (a *App) inboxDead() *cobra.Command {
	f := executor.InputFilter{States: []string{executor.InputDead}}
	c := &cobra.Command{
		Use:   "dead",
		Short: "List the dead letters: inputs that were set aside, and why",
		Long: `List the inputs that were set aside, with the reason. Nothing happens to them until somebody decides:

  postrider inbox requeue N   gives one to its run again, once the cause is mended
  postrider inbox drop N      gives it up; it stays listed with inbox ls --state dropped

What came in and is no input at all, from a broker, can only be dropped. One for a run that is done or failed can be
requeued after postrider runs reopen RUN.`,
		Example: "  postrider inbox dead\n  postrider inbox dead --run run-1 --data\n  postrider inbox dead --tenant '' -o json",
		Args:    a.noArgs,
	}
	a.inputFlags(c, &f)
	c.RunE = func(c *cobra.Command, _ []string) error { return a.listInputs(c, f, deadColumns) }
	return c
}

// inputFlags are those of what lists inputs.
func (a *App) inputFlags(c *cobra.Command, f *executor.InputFilter) {
	c.Flags().StringVar(&f.Run, "run", "", "only inputs of this `RUN`")
	c.Flags().StringVar(&f.Agent, "agent", "", "only inputs for this `AGENT`")
	c.Flags().BoolVar(&f.Data, "data", false, "with the data of each, as far as a table has room")
	c.Flags().IntVar(&f.Limit, "limit", 100, fmt.Sprintf("at most `N` inputs, up to %d", maxListed))
	c.Flags().Int64Var(&f.After, "after", 0, "only inputs behind the one with this `N`")
	must(c.RegisterFlagCompletionFunc("run", a.completeRun(0)))
	must(c.RegisterFlagCompletionFunc("agent", a.completeAgent))
}

// must is for what only a mistake in this package can make fail.
func must(err error) {
	if err != nil {
		panic(err)
	}
}

var (
	inboxColumns = []string{"N", "TENANT", "RUN", "AGENT", "ID", "TYPE", "STATE", "DUE", "ATTEMPTS", "NEXT TRY", "WHY"}
	deadColumns  = []string{"N", "TENANT", "RUN", "AGENT", "ID", "TYPE", "FROM", "DIED", "ATTEMPTS", "WHY"}
)

// inputRow is an input under one of the heads above.
func inputRow(in *executor.InputInfo, columns []string) []string {
	agent := in.Agent
	if in.Node != "" {
		agent += "@" + in.Node
	}
	why := in.Reason
	if in.LastError != "" && why == "" {
		why = cause(in.LastError)
	}
	cells := map[string]string{"N": number(in.Row), "TENANT": in.Tenant, "RUN": in.Run, "AGENT": agent, "ID": cut(in.ID, 80), "TYPE": cut(in.Type, 80), "STATE": in.State,
		"DUE": stamp(in.DueUS), "ATTEMPTS": number(in.Attempts), "NEXT TRY": stamp(in.NextUS), "FROM": cut(in.Source, 120), "DIED": stamp(in.EndedUS),
		"WHY": cut(cause(why), 200)}
	row := make([]string, len(columns))
	for i, name := range columns {
		row[i] = cells[name]
	}
	return row
}

func (a *App) listInputs(c *cobra.Command, f executor.InputFilter, columns []string) error {
	switch {
	case f.Limit < 1 || f.Limit > maxListed:
		return Usagef("--limit: %d is not 1 to %d", f.Limit, maxListed)
	case f.After < 0:
		return Usagef("--after: %d is negative", f.After)
	}
	f.Tenant = a.tenant
	return a.withNode(c, true, func(ctx context.Context, store *sqlite.Store) error {
		return a.printInputs(ctx, store, f, columns)
	})
}

// dataInputs is how many inputs one look reads with their data, each of which may have 8 MiB.
const dataInputs = 16

func (a *App) printInputs(ctx context.Context, store *sqlite.Store, f executor.InputFilter, columns []string) error {
	out := list{app: a}
	var rows [][]string
	listed, left, more := 0, f.Limit, true
	for more && left > 0 {
		if f.Limit = left; f.Data {
			f.Limit = min(left, dataInputs)
		}
		var inputs []executor.InputInfo
		var err error
		inputs, more, err = executor.Inputs(ctx, store, f)
		if err != nil {
			return err
		}
		for i := range inputs {
			in := &inputs[i]
			if a.output == "table" {
				row := inputRow(in, columns)
				if f.Data {
					row = append(row, cut(string(in.Data), 200))
				}
				rows = append(rows, row)
			} else if err := out.add(object(inputPairs(in, f.Data)...)); err != nil {
				return err
			}
			f.After = in.Row
		}
		listed, left = listed+len(inputs), left-len(inputs)
	}
	if listed == 0 && f.Run != "" && f.Tenant != "" { // nothing to list, or no such run?
		if err := knownRun(ctx, store, f.Tenant, f.Run); err != nil {
			return err
		}
	}
	var err error
	if a.output == "table" {
		if f.Data {
			columns = append(slices.Clone(columns), "DATA")
		}
		err = a.table(columns, rows)
	} else {
		err = out.end()
	}
	if err == nil && more {
		fmt.Fprintf(a.Stderr, "there are more: --after %d lists them\n", f.After)
	}
	return err
}

// knownRun fails when there is neither a run of that name nor an input for one: those for other nodes, and those that came
// malformed, have no run here.
func knownRun(ctx context.Context, store *sqlite.Store, tenant, run string) error {
	_, err := executor.TailFrom(ctx, store, tenant, run, 0)
	if !errors.Is(err, executor.ErrNotFound) {
		return err
	}
	inputs, _, other := executor.Inputs(ctx, store, executor.InputFilter{Tenant: tenant, Run: run, States: executor.InputStates, Limit: 1})
	if other != nil {
		return other
	}
	if len(inputs) == 0 {
		return noRun(err)
	}
	return nil
}

// inputPairs is an input for object.
func inputPairs(in *executor.InputInfo, data bool) []any {
	pairs := []any{"n", in.Row, "tenant", in.Tenant, "run", in.Run, "agent", in.Agent, "node", in.Node, "id", in.ID, "type", in.Type, "source", in.Source,
		"state", in.State, "reason", in.Reason, "attempts", in.Attempts, "last_error", in.LastError, "next_try_at", stampOrNull(in.NextUS),
		"arrived_at", stampOrNull(in.ArrivedUS), "due_at", stampOrNull(in.DueUS), "expires_at", stampOrNull(in.ExpiresUS), "ended_at", stampOrNull(in.EndedUS),
		"branch", in.Branch, "step", in.Step, "hops", in.Hops, "correlation", in.Correlation, "causation", in.Causation, "traceparent", in.Trace}
	if data {
		pairs = append(pairs, payload(in.Data)...)
	}
	return pairs
}

// payload is data for object, as it came: what is not JSON in base64.
func payload(data []byte) []any {
	if utf8.Valid(data) && json.Valid(data) {
		return []any{"data", raw(data)}
	}
	return []any{"data_base64", base64.StdEncoding.EncodeToString(data)}
}

func (a *App) inboxRequeue() *cobra.Command {
	return a.operation("requeue", "Give dead letters to their runs again", `Give dead letters to their runs again: under the same id, at the same place in the order, with all attempts again. One
whose time to expire has passed does not expire again. The node may be running.

With numbers, all of them are requeued or none; with --run or --all, those that can be, and the others are named. What
came in malformed cannot be; nor what is for a run that is done or failed, before postrider runs reopen RUN. The input
that a run is paused at is not dead: postrider runs resume RUN tries it again.`,
		"  postrider inbox requeue 17 18\n  postrider inbox requeue --run run-1 --reason 'disk replaced'\n  postrider inbox requeue --all --tenant ''",
		executor.Requeue, []string{executor.InputDead})
}

func (a *App) inboxDrop() *cobra.Command {
	return a.operation("drop", "Give inputs up for good", `Give up inputs that are dead or not over yet: by number, or with --run and --all the dead letters there are. A step in
hand with one changes nothing any more, and a run that is paused at one goes on with the next. Nothing is deleted: they
stay listed with postrider inbox ls --state dropped, and their ids stay taken. The node may be running.`,
		"  postrider inbox drop 17 --reason 'ordered twice'\n  postrider inbox drop --run run-1\n  postrider inbox drop --all",
		executor.Drop, append([]string{executor.InputDead}, executor.InputStates[:executor.LiveStates]...))
}

// operation is a command that handles inputs in one of the states.
func (a *App) operation(name, short, long, example string,
	do func(context.Context, *sqlite.Store, executor.Selection, string) ([]executor.Handled, error), states []string) *cobra.Command {
	var which executor.Selection
	var reason string
	c := &cobra.Command{
		Use:               name + " {N… | --run RUN | --all}",
		Short:             short,
		Long:              long,
		Example:           example,
		ValidArgsFunction: a.completeInput(states, name == "drop"), // one that is malformed cannot be requeued
	}
	c.Flags().StringVar(&which.Run, "run", "", "all dead letters of this `RUN`")
	c.Flags().BoolVar(&which.All, "all", false, "all dead letters of the tenant")
	c.Flags().StringVar(&reason, "reason", "", "`TEXT` that is kept with what was done")
	must(c.RegisterFlagCompletionFunc("run", a.completeRun(0)))
	c.RunE = func(c *cobra.Command, given []string) error {
		usage := func(format string, args ...any) error {
			return WithHint(Usagef(format, args...), "usage: %s; postrider inbox ls and inbox dead list the numbers", c.UseLine())
		}
		if c.Flags().Changed("run") && which.Run == "" {
			return usage("--run must not be empty")
		}
		switch {
		case len(given) > 0 && (which.Run != "" || which.All), which.Run != "" && which.All:
			return usage("numbers, --run and --all exclude each other")
		case len(given) == 0 && which.Run == "" && !which.All:
			return usage("%s: no input is named", c.CommandPath())
		}
		for _, arg := range given {
			n, err := strconv.ParseInt(arg, 10, 64)
			if err != nil || n < 1 {
				return usage("%q is not the number of an input", arg)
			}
			which.Rows = append(which.Rows, n)
		}
		which.Tenant = a.tenant
		return a.withNode(c, false, func(ctx context.Context, store *sqlite.Store) error {
			all, err := do(ctx, store, which, reason)
			if err != nil {
				return getOn(err)
			}
			if len(all) == 0 && which.Run != "" && a.tenant != "" {
				if err := knownRun(ctx, store, a.tenant, which.Run); err != nil {
					return err
				}
			}
			return a.printHandled(name, all)
		})
	}
	return c
}

// getOn says what there is to do about an input that cannot be requeued or dropped.
func getOn(err error) error {
	if errors.Is(err, executor.ErrNotFound) {
		return WithHint(err, "postrider inbox dead --tenant '' lists the dead letters of a database, inbox ls what is not over")
	}
	r, ok := errors.AsType[*executor.Refusal](err)
	if !ok {
		return err
	}
	switch r.Helps {
	case "resume":
		return WithHint(err, "postrider runs resume RUN tries it again, postrider inbox drop %d has the run go on without it", r.Row)
	case "reopen":
		return WithHint(err, "postrider runs reopen RUN has the run take inputs again, postrider inbox drop %d gives this one up", r.Row)
	case "drop":
		return WithHint(err, "postrider inbox drop %d gives it up", r.Row)
	}
	return WithHint(err, "postrider inbox ls --run RUN --state all lists what became of a run's inputs")
}

func (a *App) printHandled(action string, all []executor.Handled) error {
	done := action + map[string]string{"requeue": "d", "drop": "ped"}[action]
	var refused error
	n := 0
	for _, h := range all {
		if h.Refused != nil {
			n++
			refused = cmp.Or(refused, error(h.Refused))
		}
	}
	if n > 0 && n == len(all) { // then it failed
		return getOn(fmt.Errorf("none of %d dead letters can be %s: %w", n, done, refused))
	}
	out := list{app: a}
	var rows [][]string
	for _, h := range all {
		result, note := done, ""
		if h.Refused != nil {
			result, note = "left", h.Refused.Text
		} else if h.NoExpiry {
			note = "its time to expire had passed; it does not expire again"
		}
		if a.output == "table" {
			rows = append(rows, []string{number(h.Row), h.Tenant, h.Run, cut(h.ID, 80), result, cut(note, 300)})
		} else if err := out.add(object("n", h.Row, "tenant", h.Tenant, "run", h.Run, "id", h.ID, "result", result, "note", note)); err != nil {
			return err
		}
	}
	if a.output == "table" {
		return a.table([]string{"N", "TENANT", "RUN", "ID", "RESULT", "NOTE"}, rows)
	}
	return out.end()
}
