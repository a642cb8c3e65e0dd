package cli

import (
	"context"
	"errors"
	"fmt"
	"time"

	"postrider/executor"
	"postrider/internal/sqlite"
)

// waitPoll is between looks for what became of an input: a node's own writes ring no bell in this process.
const waitPoll = 100 * time.Millisecond

// lateError is the end of a wait; main's exit code for a deadline is its own.
type lateError struct{ text string }

func (e *lateError) Error() string        { return e.text }
func (e *lateError) Is(target error) bool { return target == context.DeadlineExceeded }

// wait waits for the step that consumes an input and prints what it did.
func (a *App) wait(ctx context.Context, sent executor.Submitted, limit time.Duration) error {
	store, err := sqlite.Open(ctx, a.db, sqlite.NodeSchema(a.Schema, "", a.db), sqlite.Options{ReadOnly: true, Logger: a.Log})
	if err != nil {
		return err
	}
	err = a.await(ctx, store, sent, limit)
	if gone := store.Check(); err != nil && gone != nil {
		err = WithHint(gone, "--db FILE names the database")
	}
	return errors.Join(err, store.Close())
}

func (a *App) await(ctx context.Context, store *sqlite.Store, sent executor.Submitted, limit time.Duration) error {
	late := time.After(limit)
	poll := time.NewTicker(waitPoll)
	defer poll.Stop()
	look := func() (executor.InputInfo, error) {
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		if sent.Row != 0 {
			return executor.ReadInput(ctx, store, sent.Row)
		}
		return executor.FindInput(ctx, store, sent.Tenant, sent.Run, sent.ID)
	}
	for {
		in, err := look()
		if err != nil {
			return err
		}
		what := fmt.Sprintf("input %s of run %s", in.ID, in.Run)
		switch in.State {
		case executor.InputConsumed:
			return a.printEffects(ctx, store, sent, &in)
		case executor.InputHanded:
			return a.printHandedOver(sent, &in)
		case executor.InputDead:
			return WithHint(fmt.Errorf("%s was set aside: %s", what, in.Reason), "postrider inbox requeue %d gives it again, postrider inbox drop %d gives it up", in.Row, in.Row)
		case executor.InputDropped:
			return fmt.Errorf("%s was %s: %s", what, in.State, in.Reason)
		case executor.InputCancelled:
			return fmt.Errorf("%s was cancelled by the agent that sent it", what)
		case executor.InputPaused:
			return WithHint(fmt.Errorf("%s is not consumed: the run is paused at it: %s", what, in.LastError),
				"postrider runs resume %s tries it again, postrider inbox drop %d has the run go on without it", in.Run, in.Row)
		}
		if in.RunOver() {
			return WithHint(fmt.Errorf("%s is not consumed: run %s is %s", what, in.Run, in.RunStatus),
				"postrider runs reopen %s has the run take its inputs again, postrider inbox drop %d gives this one up", in.Run, in.Row)
		}
		select {
		case <-poll.C:
		case <-late:
			return stuck(what, &in, limit)
		}
	}
}

// stuck says where an input is that was waited for in vain, and why.
func stuck(what string, in *executor.InputInfo, limit time.Duration) error {
	text := fmt.Sprintf("%s is not consumed after %s: %s", what, limit, in.State)
	switch {
	case in.LastError != "":
		text += fmt.Sprintf(", failed %d times", in.Attempts)
		if in.NextUS != 0 {
			text += ", next try at " + stamp(in.NextUS)
		}
		text += ": " + cause(in.LastError)
	case in.Reason != "":
		text += ", " + in.Reason
	case in.State == executor.InputWaiting:
		text += " until " + stamp(in.DueUS)
	}
	hint := "postrider runs show " + in.Run + " shows its run; the input is stored, and waits on"
	if in.RunStatus == "" { // there is no such run here
		hint = "postrider inbox ls --run " + in.Run + " --state all shows what becomes of it; it is stored, and waits on"
	}
	if in.State == executor.InputPending && in.LastError == "" && in.Reason == "" {
		hint = "does a node run on this database? the input is stored, and waits on"
	}
	return WithHint(&lateError{text}, "%s", hint)
}

func (a *App) printHandedOver(sent executor.Submitted, in *executor.InputInfo) error {
	if a.output != "table" {
		return a.printJSON(object("tenant", sent.Tenant, "run", sent.Run, "id", sent.ID, "duplicate", sent.Duplicate, "outcome", in.State, "node", in.Node))
	}
	return a.fields("tenant", sent.Tenant, "run", sent.Run, "id", sent.ID, "duplicate", yesNo(sent.Duplicate), "outcome", in.State, "node", in.Node)
}

func (a *App) printEffects(ctx context.Context, store *sqlite.Store, sent executor.Submitted, in *executor.InputInfo) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	l, err := executor.EffectsOf(ctx, store, in.Branch, in.Step)
	if err != nil {
		return err
	}
	if a.output != "table" {
		var events, commands, messages [][]byte
		for i := range l.Records {
			r := &l.Records[i]
			pairs := []any{"lsn", r.LSN}
			switch r.Kind {
			case "event":
				events = append(events, object(append(append(pairs, "type", r.Type, "subject", r.Subject), payload(r.Data)...)...))
			case "command":
				commands = append(commands, object(append(append(pairs, "agent", r.Destination, "run", r.Run, "type", r.Type, "id", r.InputID), payload(r.Data)...)...))
			default:
				messages = append(messages, object(append(append(pairs, "topic", r.Destination), payload(r.Data)...)...))
			}
		}
		for i := range l.Commands {
			c := &l.Commands[i]
			commands = append(commands, object(append([]any{"n", c.Row, "agent", c.Agent, "run", c.Run, "type", c.Type, "id", c.ID, "due_at", stampOrNull(c.DueUS)},
				payload(c.Data)...)...))
		}
		return a.printJSON(object("tenant", sent.Tenant, "run", sent.Run, "id", sent.ID, "duplicate", sent.Duplicate, "outcome", in.State,
			"branch", l.Branch, "step", l.Step, "live", l.Live, "next", l.Next, "lsn", l.LSN, "state", raw(l.State),
			"events", array(events), "commands", array(commands), "messages", array(messages)))
	}
	pairs := []string{"tenant", sent.Tenant, "run", sent.Run, "id", sent.ID, "duplicate", yesNo(sent.Duplicate), "branch", l.Branch, "step", number(l.Step),
		"next", l.Next, "state", cut(string(l.State), 2000)}
	if !l.Live {
		pairs = append(pairs, "taken back", "yes: a rewind abandoned this step")
	}
	if err := a.fields(pairs...); err != nil || len(l.Records)+len(l.Commands) == 0 {
		return err
	}
	if err := a.blank(); err != nil {
		return err
	}
	var rows [][]string
	for i := range l.Records {
		r := &l.Records[i]
		rows = append(rows, []string{number(r.LSN), r.Kind, r.Type, cut(r.InputID, 80), cut(where(r), 120), cut(string(r.Data), 200)})
	}
	for i := range l.Commands {
		c := &l.Commands[i]
		rows = append(rows, []string{"", "command", c.Type, cut(c.ID, 80), c.Agent + " " + c.Run, cut(string(c.Data), 200)})
	}
	return a.table([]string{"LSN", "KIND", "TYPE", "ID", "TO", "DATA"}, rows)
}

// where is a record's destination; of a command also the run.
func where(r *executor.RecordInfo) string {
	if r.Run != "" {
		return r.Destination + " " + r.Run
	}
	return r.Destination
}

// array is a JSON array of values that stand in it as they are.
func array(values [][]byte) raw {
	b := []byte{'['}
	for i, v := range values {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, v...)
	}
	return append(b, ']')
}
