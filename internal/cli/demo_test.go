package cli

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
)

func TestDemoRefusesWhatMeansNothingToIt(t *testing.T) {
	for _, flag := range []string{"--db=x.db", "--tenant=acme", "--tenant=default"} {
		var usage *UsageError
		if ran, err := run(t, "demo", flag); !errors.As(err, &usage) || len(ran) != 0 || !strings.Contains(err.Error(), strings.SplitN(flag, "=", 2)[0]) {
			t.Errorf("%s: %v, ran %v", flag, err, ran)
		}
	}
	t.Setenv("POSTRIDER_DB", "x.db") // is meant for other commands
	t.Setenv("POSTRIDER_TENANT", "acme")
	for _, c := range []struct {
		args string
		want Demo
	}{{"demo", Demo{}}, {"demo --keep -o json", Demo{Keep: true, JSON: true}}, {"demo --log-level=info", Demo{Plain: true}}} {
		if ran, err := run(t, strings.Fields(c.args)...); err != nil || len(ran) != 1 || ran[0] != c.want {
			t.Errorf("%s: %v, %v", c.args, ran, err)
		}
	}
}

func TestDemoLogsOnlyWhenItFailsOrIsAsked(t *testing.T) {
	broken := errors.New("broken")
	for _, c := range []struct {
		args  []string
		fails error
		want  bool
	}{{nil, nil, false}, {nil, broken, true}, {[]string{"--log-level", "warn"}, nil, true}} {
		var out bytes.Buffer
		a := &App{Stdin: strings.NewReader(""), Stdout: &out, Stderr: &out}
		root := a.Root(a.Demo(func(context.Context, Demo) error {
			a.Log.Warn("something is wrong", "component", "relay")
			a.Log.Info("something is right")
			return c.fails
		}))
		root.SetArgs(append([]string{"demo"}, c.args...))
		if err := root.ExecuteContext(t.Context()); !errors.Is(err, c.fails) {
			t.Errorf("%v", err)
		}
		if got := strings.Contains(out.String(), `msg="something is wrong" component=relay`); got != c.want || strings.Contains(out.String(), "right") {
			t.Errorf("%v, %v: logged %q", c.args, c.fails, &out)
		}
	}
}
