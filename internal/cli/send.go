package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
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
	var later, timeout time.Duration
	var wait bool
	c := &cobra.Command{
		Use:   "send AGENT[@NODE] [RUN]",
		Short: "Give an agent an input",
		Long: `Store an input for a run of an agent, durably, and print where it went. Without RUN a new run is started. The node
need not be running; one that runs takes the input within a quarter of a second.

An input with an --id counts once in its run, however often it is sent; the same id with other content is a conflict.

AGENT is one that was hosted on this database before, or has a route; AGENT@NODE is another node's, and the input is
handed over to it by MQTT. A traceparent in the environment variable TRACEPARENT goes along.

With --wait the command ends when a step has consumed the input, and prints what that step did. It fails when the input
is set aside (exit code 1), when its run is paused at it, done or failed (1), or when --timeout has passed (124): then the input waits on.
An input that was handed over to another node has come as far as can be waited for. Of an input that was sent before,
what its step did is printed.`,
		Example: "  postrider send counter run-1 --data '{\"hello\": 1}'\n" +
			"  postrider send counter run-1 --type order --id order-17 --data @order.json\n" +
			"  postrider send counter run-1 --wait --timeout 10s -o json\n" +
			"  postrider send billing@hq inv-7 --data '{\"amount\": 12}'\n" +
			"  date +'\"%F\"' | postrider send counter run-1 --data - --in 5m",
		Args:              args(1, "AGENT", "RUN"),
		ValidArgsFunction: a.completeSend,
	}
	f := c.Flags()
	f.StringVar(&in.Type, "type", "message", "`TYPE` of the input")
	f.StringVar(&in.ID, "id", "", "`ID` that makes the input count once (default a new one)")
	f.StringVar(&data, "data", "null", "`JSON` of the input, @FILE to read it from a file, - from stdin")
	f.DurationVar(&later, "in", 0, "due after this `DURATION`, such as 5m")
	f.StringVar(&at, "at", "", "due at this `TIME`, RFC 3339")
	f.BoolVar(&wait, "wait", false, "wait for the step that consumes the input, and print what it did")
	f.DurationVar(&timeout, "timeout", time.Minute, "how long --wait waits, `DURATION`")
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
		if !wait && a.given(c, "timeout") {
			return WithHint(Usagef("--timeout is how long --wait waits, which is not given"), "--in DURATION has the input wait")
		}
		if timeout <= 0 {
			return Usagef("--timeout: %s is no time to wait", timeout)
		}
		if in.AtUS, err = due(later, at); err != nil {
			return err
		}
		if c.Flags().Changed("at") && at == "" {
			return Usagef("--at must not be empty")
		}
		in.In = later
		in.Trace = traceparent(os.Getenv("TRACEPARENT"))
		if in.Data, err = a.data(data); err != nil {
			return err
		}
		var out executor.Submitted
		err = a.withNode(c, false, func(ctx context.Context, store *sqlite.Store) (err error) {
			out, err = executor.Submit(ctx, store, in)
			return err
		})
		if errors.Is(err, executor.ErrNotFound) {
			err = WithHint(err, "start a node on this database with --agent %s=KIND:SPEC, or --route %s=NODE; it may be stopped afterwards", in.Agent, in.Agent)
		}
		if err != nil {
			return err
		}
		if wait {
			return a.wait(c.Context(), out, timeout)
		}
		if a.output != "table" {
			return a.printJSON(appendJSON(nil, out))
		}
		return a.table([]string{"TENANT", "RUN", "ID", "DUPLICATE"}, [][]string{{out.Tenant, out.Run, out.ID, yesNo(out.Duplicate)}})
	}
	return c
}

// traceparentForm is a W3C traceparent of version 00.
var traceparentForm = regexp.MustCompile(`^00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}$`)

// traceparent is s if it is one; else it is to be ignored.
func traceparent(s string) string {
	m := traceparentForm.FindStringSubmatch(s)
	if m == nil || strings.Trim(m[1], "0") == "" || strings.Trim(m[2], "0") == "" {
		return ""
	}
	return s
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
	us, err := executor.ParseTime(at)
	if err != nil {
		return 0, Usagef("--at: %w", err)
	}
	return us, nil
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
