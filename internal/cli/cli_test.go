package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"postrider/executor"
)

// tree is the whole command line; what it would run is recorded.
func tree(out *bytes.Buffer) (a *App, root *cobra.Command, ran *[]any) {
	ran = &[]any{}
	a = &App{Stdin: strings.NewReader(""), Stdout: out, Stderr: out}
	node := func(_ context.Context, n Node) error { *ran = append(*ran, n); return nil }
	root = a.Root(
		a.Demo(func(_ context.Context, d Demo) error { *ran = append(*ran, d); return nil }),
		a.Dev(node), a.Serve(node), a.Relay(func(_ context.Context, r Relay) error { *ran = append(*ran, r); return nil }),
		a.Send(), a.Runs(func(f func(context.Context, Tail) error) func(context.Context, Tail) error { return f }), a.Rewind(), a.Inbox(), a.Outbox(), a.Fold(func(_ context.Context, f Fold) error { *ran = append(*ran, f); return nil }), a.Version(),
	)
	return a, root, ran
}

func run(t *testing.T, args ...string) (ran []any, err error) {
	t.Helper()
	var out bytes.Buffer
	_, root, list := tree(&out)
	root.SetArgs(args)
	err = root.ExecuteContext(t.Context())
	return *list, err
}

func TestEveryCommandHasHelpWithAnExample(t *testing.T) {
	_, root, _ := tree(&bytes.Buffer{})
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		if c.Short == "" || !strings.Contains(c.Example, "postrider ") {
			t.Errorf("%s: no short help, or no example", c.CommandPath())
		}
		for line := range strings.Lines(c.Example) {
			if !strings.HasPrefix(line, "  ") {
				t.Errorf("%s: example %q is not indented", c.CommandPath(), line)
			}
		}
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(root)
}

func TestCleanLeavesNothingForATerminalToObey(t *testing.T) {
	for in, want := range map[string]string{
		"plain, größer, 日本 😀":  "plain, größer, 日本 😀",
		"a\x1b[2Jb\r\nc\td":    `a\x1b[2Jb\r\nc\td`,
		"\u009b31m\x7f\x00":    `\u009b31m\x7f\x00`,
		"\u202egnp.exe\u2066":  `\u202egnp.exe\u2066`,
		"broken \xff\xc3 text": `broken \xff\xc3 text`,
		"kept \ufffd":          "kept \ufffd",
		`{"a": "\u001b"}`:      `{"a": "\u001b"}`,
		"line\u2028separators": `line\u2028separators`,
		"":                     "",
	} {
		if got := clean(in); got != want {
			t.Errorf("clean(%q) = %q, not %q", in, got, want)
		}
	}
}

func TestObjectKeepsRawBytes(t *testing.T) {
	state := "{ \"a\" : 1.0,\n \"b\":\"<&>\\u0041\", \"big\":12345678901234567890 }"
	got := string(object("run", "<r>", "state", raw(state), "n", int64(1)))
	if want := `{"run":"<r>","state":` + state + `,"n":1}`; got != want {
		t.Errorf("object: %s, not %s", got, want)
	}
	for form, want := range map[string]string{"json": state + "\n", "jsonl": strings.ReplaceAll(state, "\n", " ") + "\n"} {
		var out bytes.Buffer
		a := &App{Stdout: &out, output: form}
		if err := a.printJSON([]byte(state)); err != nil || out.String() != want {
			t.Errorf("-o %s: %v, %q, not %q", form, err, out.String(), want)
		}
	}
}

// DEL, the C1 controls and what turns the direction of writing, which the encoder leaves as they are, are escaped in what is encoded here and nowhere else.
func TestControlCharactersAreEscapedInJSON(t *testing.T) {
	text := "a\x7f\u0080\u009b31m\u009f\u061c\u200f\u202e\u2069\u00a0é\x1b<&>\xff\U0001f600"
	want := `"a\u007f\u0080\u009b31m\u009f\u061c\u200f\u202e\u2069` + "\u00a0é" + `\u001b<&>\ufffd` + "\U0001f600" + `"`
	if got := string(appendJSON(nil, text)); got != want {
		t.Errorf("%q, not %q", got, want)
	}
	var back string
	if err := json.Unmarshal([]byte(want), &back); err != nil || back != strings.ToValidUTF8(text, "\ufffd") {
		t.Errorf("%q, %v", back, err)
	}
	if got := string(object("k\x7f", raw("\"\u009b\u202e\""))); got != `{"k\u007f":"`+"\u009b\u202e"+`"}` {
		t.Errorf("%q", got)
	}
}

func TestRestsAreTold(t *testing.T) {
	rest := func(status, lastError string, wake, claim int64) string {
		return restOf(&executor.Tailed{RunInfo: executor.RunInfo{Status: status, LastError: lastError, WakeUS: wake}, Claim: claim})
	}
	for _, status := range []string{"idle", "ready", "running"} {
		if got := rest(status, "", 0, 1); got != "" {
			t.Errorf("%s is a rest: %q", status, got)
		}
	}
	if rest("waiting", "", 5, 1) != rest("waiting", "", 5, 2) {
		t.Error("a timer is news after each step")
	}
	for name, pair := range map[string][2]string{
		"another timer":    {rest("waiting", "", 5, 1), rest("waiting", "", 6, 1)},
		"an error":         {rest("waiting", "", 5, 1), rest("waiting", "x", 5, 1)},
		"a second pause":   {rest("paused", "x", 0, 1), rest("paused", "x", 0, 3)},
		"another reason":   {rest("paused", "x", 0, 1), rest("paused", "y", 0, 1)},
		"done, not failed": {rest("done", "", 0, 1), rest("failed", "", 0, 1)},
	} {
		if pair[0] == pair[1] || pair[0] == "" || pair[1] == "" {
			t.Errorf("%s: %q", name, pair)
		}
	}
}

func TestListForms(t *testing.T) {
	for _, c := range []struct {
		form, want string
		values     []string
	}{
		{"json", "[]\n", nil}, {"json", "[1]\n", []string{"1"}}, {"json", "[1,\n2]\n", []string{"1", "2"}},
		{"jsonl", "", nil}, {"jsonl", "1\n2\n", []string{"1", "2"}},
	} {
		var out bytes.Buffer
		l := list{app: &App{Stdout: &out, output: c.form}}
		var err error
		for _, v := range c.values {
			err = errors.Join(err, l.add([]byte(v)))
		}
		if err := errors.Join(err, l.end()); err != nil || out.String() != c.want {
			t.Errorf("%s %v: %v, %q, not %q", c.form, c.values, err, out.String(), c.want)
		}
	}
}

func TestTableIsEscapedAndAligned(t *testing.T) {
	var out bytes.Buffer
	a := &App{Stdout: &out}
	if err := a.table([]string{"A", "B"}, [][]string{{"x\ty", ""}, {"\x1b[1m", "z"}}); err != nil {
		t.Fatal(err)
	}
	if want := "A        B\nx\\ty     -\n\\x1b[1m  z\n"; out.String() != want {
		t.Errorf("%q, not %q", out.String(), want)
	}
}

func TestFlagsComeFromTheEnvironment(t *testing.T) {
	t.Setenv("POSTRIDER_AGENT", "one=go:counter\ntwo=exec:cat -")
	t.Setenv("POSTRIDER_BROKER", "from-env")
	t.Setenv("POSTRIDER_ON_EXHAUSTED", "dead-letter")
	t.Setenv("POSTRIDER_STEP_TIMEOUT", "3s")
	t.Setenv("POSTRIDER_DB", "env.db")
	ran, err := run(t, "serve", "--broker", "from-flag")
	if err != nil || len(ran) != 1 {
		t.Fatalf("%v, ran %d", err, len(ran))
	}
	n := ran[0].(Node)
	if !slices.Equal(n.Agents, []string{"one=go:counter", "two=exec:cat -"}) || n.Broker != "from-flag" || !n.DeadLetter ||
		n.StepTimeout != 3*time.Second || n.DB != "env.db" || n.Workers != 64 {
		t.Errorf("%+v", n)
	}
	t.Setenv("POSTRIDER_STEP_TIMEOUT", "soon")
	var usage *UsageError
	if _, err := run(t, "serve"); !errors.As(err, &usage) || !strings.Contains(err.Error(), "POSTRIDER_STEP_TIMEOUT") {
		t.Errorf("%v does not name the variable", err)
	}
}

func TestDefaultDatabases(t *testing.T) {
	ran, err := run(t, "dev", "--db", "some/where.db")
	if err != nil {
		t.Fatal(err)
	}
	if n := ran[0].(Node); n.DB != "some/where.db" || n.FoldDB != "some/where.fold.db" || n.NewName == "" || n.Name != "" {
		t.Errorf("dev: %+v", n)
	}
	if got := foldBeside("x"); got != "x.fold.db" {
		t.Errorf("foldBeside: %s", got)
	}
	ran, err = run(t, "fold", "--broker", "b", "--partitions", "3,0-1")
	if err != nil {
		t.Fatal(err)
	}
	if f := ran[0].(Fold); f.DB != "postrider.fold.db" || f.Tenant != "" || !slices.Equal(f.Partitions, []int{0, 1, 3}) {
		t.Errorf("fold: %+v", f)
	}
	ran, err = run(t, "relay", "--broker", "b")
	if err != nil {
		t.Fatal(err)
	}
	if r := ran[0].(Relay); r.DB != "postrider.db" {
		t.Errorf("relay: %+v", r)
	}
}

func TestDue(t *testing.T) {
	for _, c := range []struct {
		in   time.Duration
		at   string
		want int64
		bad  bool
	}{
		{0, "", 0, false}, {time.Second, "", 0, false}, {-1, "", 0, true}, {1, "2026-01-01T00:00:00Z", 0, true},
		{0, "1970-01-01T01:00:01.5+01:00", 1_500_000, false}, {0, "0001-01-01T00:00:00Z", 0, true}, {0, "noon", 0, true},
	} {
		got, err := due(c.in, c.at)
		if got != c.want || (err != nil) != c.bad {
			t.Errorf("due(%s, %q) = %d, %v", c.in, c.at, got, err)
		}
	}
}

func TestHintsSurviveWrapping(t *testing.T) {
	err := fmt.Errorf("outer: %w", WithHint(Usagef("inner"), "do %s", "this"))
	var usage *UsageError
	if HintOf(err) != "do this" || !errors.As(err, &usage) || err.Error() != "outer: inner" {
		t.Errorf("%v, hint %q", err, HintOf(err))
	}
	var out bytes.Buffer
	(&App{Stderr: &out}).PrintError(errors.New("two\nlines"), "and \x1b more")
	if want := "postrider: two\\nlines\nhint: and \\x1b more\n"; out.String() != want {
		t.Errorf("%q, not %q", out.String(), want)
	}
}
