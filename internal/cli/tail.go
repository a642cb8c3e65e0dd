package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"postrider/executor"
	"postrider/internal/sqlite"
)

// Tail is what `runs tail` is told.
type Tail struct {
	Run       string
	Last      int
	UntilDone bool
	Data      bool
}

const (
	tailPoll = 200 * time.Millisecond // between looks for what other processes have committed
	dataPage = 16                     // events per look where each may have a state of 16 MiB
)

func (a *App) runsTail(run func(ctx context.Context, o Tail) error) *cobra.Command {
	var o Tail
	c := &cobra.Command{
		Use:   "tail RUN",
		Short: "Follow a run live",
		Long: `Print what happened last in a run, then each new thing once it is committed, until interrupted:

  step     a step was committed
  rewind   a new branch was opened at STEP, and is the live one now
  dead     an input was set aside
  status   the run rests: it waits for a timer or after an error, is paused, done, failed, or its agent is not hosted

The node need not be running. With -o jsonl each line is an object with its kind; for what has no end, json is the same.`,
		Example: "  postrider runs tail run-1\n" +
			"  postrider runs tail run-1 --last 0 --data\n" +
			"  postrider runs tail run-1 --until-done -o jsonl | jq 'select(.kind == \"step\")'",
		Args:              args(1, "RUN"),
		ValidArgsFunction: a.completeRun(0),
	}
	c.Flags().IntVar(&o.Last, "last", 10, "begin with the last `N` of what already happened; 0: with what comes")
	c.Flags().BoolVar(&o.Data, "data", false, "also print the data of inputs and the states after steps")
	c.Flags().BoolVar(&o.UntilDone, "until-done", false, "end when the run is done or failed")
	c.RunE = func(c *cobra.Command, given []string) error {
		if err := a.oneTenant(); err != nil {
			return err
		}
		if o.Last < 0 {
			return Usagef("--last: %d is negative", o.Last)
		}
		o.Run = given[0]
		return run(c.Context(), o)
	}
	return c
}

// tail looks again and again: each look is one short snapshot, since a reader that stays keeps the log of its writers growing.
func (a *App) tail(ctx context.Context, o Tail) error {
	store, err := sqlite.Open(ctx, a.db, sqlite.NodeSchema(a.Schema, "", a.db), sqlite.Options{ReadOnly: true, Logger: a.Log})
	if err != nil {
		return err
	}
	err = a.follow(ctx, store, o)
	if ctx.Err() != nil {
		err = nil
	}
	if gone := store.Check(); err != nil && gone != nil { // the reason for whatever went wrong
		err = WithHint(gone, "--db FILE names the database")
	}
	return errors.Join(err, store.Close())
}

func (a *App) follow(ctx context.Context, store *sqlite.Store, o Tail) error {
	limit := page
	if o.Data {
		limit = dataPage
	}
	var at executor.TailCursor
	look := func() (t executor.Tailed, err error) {
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		return executor.Tail(ctx, store, a.tenant, o.Run, &at, limit, o.Data)
	}
	at, err := executor.TailFrom(ctx, store, a.tenant, o.Run, o.Last)
	if err != nil {
		return noRun(err)
	}
	if a.output == "table" {
		if _, err := fmt.Fprintf(a.Stdout, tailRow, "TIME", "KIND", "STEP", "LSN", "BRANCH", "NEXT", "DETAIL"); err != nil {
			return err
		}
	}
	told := "" // the rest that was printed last
	silent := o.Last == 0
	poll := time.NewTicker(tailPoll)
	defer poll.Stop()
	for {
		t, err := look()
		if err != nil {
			return noRun(err)
		}
		for i := range t.Events {
			if err := a.printEvent(&t.Events[i], o.Data); err != nil {
				return err
			}
		}
		if t.More {
			continue
		}
		if rest := restOf(&t); rest != "" && rest != told {
			told = rest
			if !silent {
				if err := a.printRest(&t); err != nil {
					return err
				}
			}
		}
		silent = false
		if o.UntilDone && (t.Status == "done" || t.Status == "failed") {
			return nil
		}
		if err := store.Check(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-poll.C:
		}
	}
}

// restOf tells one rest of a run from another; "" while it goes on. Steps that leave a timer as it was are no news of it.
func restOf(t *executor.Tailed) string {
	switch {
	case t.Status == "waiting" && t.LastError == "":
		return fmt.Sprint(t.Status, t.WakeUS)
	case t.Status == "waiting", t.Status == "paused", t.Status == "done", t.Status == "failed", t.Status == "unhosted":
		return fmt.Sprint(t.Status, t.Claim, t.Attempts, t.LastError)
	}
	return ""
}

const tailRow = "%-27s  %-6s  %-5s  %-5s  %-26s  %-8s  %s\n"

func (a *App) tailRow(us int64, kind string, step, lsn int64, branch, next, detail string) error {
	row := []any{stamp(us), kind, number(step), number(lsn), branch, next, detail}
	if branch == "" {
		row[2], row[3], row[4] = "-", "-", "-"
	}
	for i, cell := range row {
		if row[i] = clean(cell.(string)); cell == "" {
			row[i] = "-"
		}
	}
	_, err := fmt.Fprintf(a.Stdout, tailRow, row...)
	return err
}

func (a *App) printEvent(e *executor.Event, withData bool) error {
	input := strings.TrimSpace(e.InputType + " " + e.Input)
	if a.output == "table" {
		detail := input
		switch e.Kind {
		case "rewind":
			detail = e.Reason + ", from " + e.Parent
		case "dead":
			detail += ": " + cut(cause(e.Reason), 500)
		}
		if withData && e.Data != nil {
			detail += " " + cut(string(e.Data), 200)
		}
		if withData && e.State != nil {
			detail += " -> " + cut(string(e.State), 200)
		}
		return a.tailRow(e.AtUS, e.Kind, e.Step, e.LSN, e.Branch, e.Next, detail)
	}
	pairs := []any{"kind", e.Kind}
	switch e.Kind {
	case "step":
		pairs = append(pairs, "branch", e.Branch, "step", e.Step, "input", e.Input, "input_type", e.InputType, "lsn", e.LSN, "next", e.Next,
			"started_at", stampOrNull(e.StartedUS), "committed_at", stampOrNull(e.AtUS))
	case "rewind":
		pairs = append(pairs, "branch", e.Branch, "gen", e.Gen, "parent", e.Parent, "fork_step", e.Step, "fork_lsn", e.LSN, "reason", e.Reason,
			"opened_at", stampOrNull(e.AtUS))
	case "dead":
		pairs = append(pairs, "input", e.Input, "input_type", e.InputType, "reason", e.Reason, "ended_at", stampOrNull(e.AtUS))
	}
	if withData && e.Kind != "rewind" {
		pairs = append(pairs, "data", rawOrNull(e.Data))
	}
	if withData && e.Kind == "step" {
		pairs = append(pairs, "state", rawOrNull(e.State))
	}
	return a.printLine(object(pairs...))
}

func (a *App) printRest(t *executor.Tailed) error {
	if a.output != "table" {
		return a.printLine(object("kind", "status", "status", t.Status, "branch", t.Branch, "step", t.Step, "lsn", t.LSN, "attempts", t.Attempts,
			"last_error", t.LastError, "wake_at", stampOrNull(t.WakeUS), "updated_at", stampOrNull(t.UpdatedUS)))
	}
	detail := cut(cause(t.LastError), 500)
	switch {
	case t.Status == "unhosted":
		detail = "no agent " + t.Agent + " in the node"
	case t.WakeUS != 0 && detail == "":
		detail = "until " + stamp(t.WakeUS)
	case t.WakeUS != 0:
		detail = fmt.Sprintf("until %s, after attempt %d: %s", stamp(t.WakeUS), t.Attempts, detail)
	}
	return a.tailRow(t.UpdatedUS, "status", t.Step, t.LSN, t.Branch, t.Status, detail)
}

func rawOrNull(b []byte) any {
	if b == nil {
		return nil
	}
	return raw(b)
}
