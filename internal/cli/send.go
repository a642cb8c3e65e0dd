package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"postrider/executor"
	"postrider/internal/sqlite"
)

// maxData is how much of a file or of stdin is read; what an input may have is less.
const maxData = 64 << 20

// Send is `send`.
func (a *App) Send() *cobra.Command {
	in := executor.Input{Source: "cli"}
	var data, at string
	var wait time.Duration
	c := &cobra.Command{
		Use:   "send AGENT [RUN]",
		Short: "Give an agent an input",
		Long: `Store an input for a run of an agent, durably, and print where it went. Without RUN a new run is started. The node
need not be running; one that runs takes the input within a quarter of a second.

An input with an --id counts once in its run, however often it is sent; the same id with other content is a conflict.`,
		Example: "  postrider send counter run-1 --data '{\"hello\": 1}'\n" +
			"  postrider send counter run-1 --type order --id order-17 --data @order.json\n" +
			"  date +'\"%F\"' | postrider send counter run-1 --data - --in 5m",
		Args:              args(1, "AGENT", "RUN"),
		ValidArgsFunction: a.completeSend,
	}
	f := c.Flags()
	f.StringVar(&in.Type, "type", "message", "`TYPE` of the input")
	f.StringVar(&in.ID, "id", "", "`ID` that makes the input count once (default a new one)")
	f.StringVar(&data, "data", "null", "`JSON` of the input, @FILE to read it from a file, - from stdin")
	f.DurationVar(&wait, "in", 0, "due after this `DURATION`, such as 5m")
	f.StringVar(&at, "at", "", "due at this `TIME`, RFC 3339")
	c.RunE = func(c *cobra.Command, given []string) (err error) {
		if err := a.oneTenant(); err != nil {
			return err
		}
		in.Tenant, in.Agent = a.tenant, given[0]
		if len(given) > 1 {
			in.Run = given[1]
		}
		if c.Flags().Changed("id") && in.ID == "" {
			return WithHint(Usagef("--id must not be empty"), "left out, it stands for a new one")
		}
		if in.AtUS, err = due(wait, at); err != nil {
			return err
		}
		if c.Flags().Changed("at") && at == "" {
			return Usagef("--at must not be empty")
		}
		in.In = wait
		if in.Data, err = a.data(data); err != nil {
			return err
		}
		var out executor.Submitted
		err = a.withNode(c, false, func(ctx context.Context, store *sqlite.Store) (err error) {
			out, err = executor.Submit(ctx, store, in)
			return err
		})
		if errors.Is(err, executor.ErrNotFound) {
			err = WithHint(err, "start a node on this database with --agent %s=KIND:SPEC; it may be stopped afterwards", in.Agent)
		}
		if err != nil {
			return err
		}
		if a.output != "table" {
			return a.printJSON(appendJSON(nil, out))
		}
		return a.table([]string{"TENANT", "RUN", "ID", "DUPLICATE"}, [][]string{{out.Tenant, out.Run, out.ID, yesNo(out.Duplicate)}})
	}
	return c
}

// due is the time that --at gives, in microseconds; 0: none.
func due(in time.Duration, at string) (int64, error) {
	switch {
	case in != 0 && at != "":
		return 0, Usagef("--in and --at exclude each other")
	case in < 0:
		return 0, Usagef("--in: %s is negative", in)
	case at == "":
		return 0, nil
	}
	t, err := time.Parse(time.RFC3339Nano, at)
	if err != nil {
		return 0, Usagef("--at: %q is not a time such as 2026-01-31T12:00:00Z", at)
	}
	if y := t.UTC().Year(); y < 1970 || y > 9999 {
		return 0, Usagef("--at: %d is not a year from 1970 to 9999", y)
	}
	return t.UnixMicro(), nil
}

// data is what --data names. What cannot be read is a wrong argument.
func (a *App) data(arg string) (b []byte, err error) {
	from, name := io.Reader(strings.NewReader(arg)), "the argument"
	switch {
	case arg == "-":
		from, name = a.Stdin, "stdin"
	case arg == "@":
		return nil, Usagef("--data: the name of a file is missing behind @")
	case strings.HasPrefix(arg, "@"):
		name = arg[1:]
		f, err := os.Open(name)
		if errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("--data: %w", err)
		}
		if err != nil {
			return nil, Usagef("--data: %w", err)
		}
		defer f.Close()
		from = f
	}
	b, err = io.ReadAll(io.LimitReader(from, maxData+1))
	switch {
	case errors.Is(err, syscall.EISDIR):
		return nil, Usagef("--data: %s is a folder", name)
	case err != nil:
		return nil, Usagef("--data: %w", err)
	case len(b) > maxData:
		return nil, Usagef("--data: more than %d bytes", maxData)
	case len(b) == 0:
		return nil, WithHint(Usagef("--data: %s is empty, which is no JSON", name), "without --data the input has null")
	}
	return b, nil
}
