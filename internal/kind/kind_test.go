package kind

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	"postrider/internal/agent"
)

func TestParseSpec(t *testing.T) {
	for in, want := range map[string][3]string{
		"counter=go:counter":                {"counter", "go", "counter"},
		"a_B-9=exec:./x.py --k=v a:b":       {"a_B-9", "exec", "./x.py --k=v a:b"},
		"a=later:x":                         {"a", "later", "x"}, // New knows the kinds
		strings.Repeat("n", 64) + "=exec:x": {strings.Repeat("n", 64), "exec", "x"},
	} {
		name, kind, spec, err := ParseSpec(in)
		if got := [3]string{name, kind, spec}; err != nil || got != want {
			t.Errorf("%s: %q, %v", in, got, err)
		}
	}
	for in, want := range map[string]string{
		"":                                  `want NAME=KIND:SPEC`,
		"counter":                           `want NAME=KIND:SPEC`,
		"counter=exec":                      `want NAME=KIND:SPEC`,
		"counter=exec: ":                    `want NAME=KIND:SPEC`,
		"counter=:x":                        `want NAME=KIND:SPEC`,
		"=exec:x":                           `the name "" is not`,
		"a b=exec:x":                        `the name "a b" is not`,
		"a\n=exec:x":                        `the name "a\n" is not`,
		strings.Repeat("n", 65) + "=exec:x": `is not 1 to 64 of`,
	} {
		_, _, _, err := ParseSpec(in)
		checkError(t, err, want)
	}
}

func TestNewKnowsItsKinds(t *testing.T) {
	a, err := New("exec", "a", odd("ok"), ExecOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.Step(t.Context(), step("x")); err != nil {
		t.Error(err)
	}
	if err := a.Close(t.Context()); err != nil {
		t.Error(err)
	}
	_, err = New("go", "a", "nope", ExecOptions{})
	checkError(t, err, `agent a: no Go agent "nope"; there is counter`)
	_, err = New("wasm", "a", "x", ExecOptions{})
	checkError(t, err, `agent a: unknown kind "wasm"`)
}

// Only what surely cannot run is refused: the rest the shell resolves, and the first step says.
func TestMissingProgramIsRefused(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	for name, mode := range map[string]os.FileMode{"tool": 0o755, "text": 0o644} {
		if err := os.WriteFile(name, []byte("#!/bin/sh\n"), mode); err != nil {
			t.Fatal(err)
		}
	}
	path := os.Getenv("PATH")
	for command, want := range map[string]string{
		"nosuch": "agent a: command nosuch is not found", "nosuch arg": "command nosuch is not found", "./nosuch": "command ./nosuch is not found",
		"./text": "command ./text is not executable", dir: "is a directory", "tool": "command tool is not found",
		"sh -c x": "", "./tool": "", dir + "/tool x": "", "exec nosuch": "", "nosuch | cat": "", "X=1 nosuch": "", "$TOOL": "", "if": "",
	} {
		_, err := New("exec", "a", command, ExecOptions{})
		if want == "" && err != nil || want != "" && (!errors.Is(err, ErrNoProgram) || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", command, err, want)
		}
	}
	for _, path := range []string{"", dir, ".:" + path} { // the shell has a path of its own; found; found as the shell finds it
		t.Setenv("PATH", path)
		if _, err := New("exec", "a", "tool", ExecOptions{}); err != nil {
			t.Errorf("PATH=%s: %v", path, err)
		}
	}
}

func TestGoCounterCounts(t *testing.T) {
	a, err := New("go", "counter", "counter", ExecOptions{})
	if err != nil {
		t.Fatal(err)
	}
	testCounter(t, a)
	s := step("x")
	s.State = []byte(`{"n":"three"}`)
	_, err = a.Step(t.Context(), s)
	checkError(t, err, "read own state")
	if err := a.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestAPanicOfAGoAgentFailsItsStepOnly(t *testing.T) {
	a := goHost{agent.Func(func(context.Context, agent.Step) (agent.Effects, error) { panic("oh") })}
	_, err := a.Step(t.Context(), step("x"))
	checkError(t, err, "agent a, step t/r/b/1/x: panic: oh")
}
