package cli

import (
	"bytes"
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// completed is what a shell is offered for the last of words.
func completed(t *testing.T, words ...string) (offers []string, directive string) {
	t.Helper()
	var out, errs bytes.Buffer
	a, root, _ := tree(&out)
	a.Stderr = &errs
	root.SetArgs(append([]string{cobra.ShellCompNoDescRequestCmd}, words...))
	if err := a.Execute(t.Context(), root); err != nil {
		t.Fatalf("%q: %v", words, err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if errs.Len() > 0 {
		t.Errorf("%q: stderr %q", words, errs.String())
	}
	return lines[:len(lines)-1], lines[len(lines)-1]
}

func TestCompletionOffersWhatIsKnown(t *testing.T) {
	t.Chdir(t.TempDir())
	t.Setenv("POSTRIDER_OUTPUT", "nonsense") // is no business of a completion
	const noFile, files = ":4", ":0"
	for _, c := range []struct {
		words     string
		offers    string // "…": more
		directive string
	}{
		{"runs ls --output ", "table json jsonl", noFile}, {"runs ls -o ", "table json jsonl", noFile}, {"runs ls --output=", "table json jsonl", noFile},
		{"send a --log-level ", "debug info warn error", noFile}, {"dev --log-format ", "text json", noFile},
		{"serve --on-exhausted ", "pause dead-letter", noFile}, {"dev --on-exhausted ", "pause dead-letter", noFile},
		{"outbox ls --state ", "pending shipped withheld dead expired all", noFile}, {"outbox ls --kind ", "event command message", noFile},
		{"runs ls --db ", "", files}, {"fold --db ", "", files}, {"fold show --db ", "", files}, {"serve --node ", "", noFile},
		{"runs ls ", "", noFile}, {"send ", "", noFile}, {"send a ", "", noFile}, {"runs tail ", "", noFile}, {"rewind ", "", noFile}, {"fold show ", "", noFile},
		{"runs ", "ls show steps tail resume reopen", noFile}, {"inbox ", "ls dead requeue drop", noFile},
		{"inbox ls --state ", "waiting pending running paused unhosted elsewhere consumed cancelled dead handed-over dropped all", noFile},
		{"inbox requeue ", "", noFile}, {"inbox drop --run ", "", noFile}, {"inbox ls --agent ", "", noFile}, {"runs resume ", "", noFile}, {"send a@", "", noFile}, {"completion ", "bash zsh fish", noFile}, {"outbox s", "stats", noFile},
	} {
		offers, directive := completed(t, strings.Split(c.words, " ")...)
		if got := strings.Join(offers, " "); got != c.offers || directive != c.directive {
			t.Errorf("%s: %q %s, want %q %s", c.words, got, directive, c.offers, c.directive)
		}
	}
	if list, err := os.ReadDir("."); err != nil || len(list) > 0 {
		t.Errorf("completion made %v, %v", list, err)
	}
}

// Of a flag that has few values, each is taken and no other is offered.
func TestChoicesAreWhatIsTaken(t *testing.T) {
	_, root, _ := tree(&bytes.Buffer{})
	seen := map[string]bool{}
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		for _, flags := range []*pflag.FlagSet{c.Flags(), c.PersistentFlags()} {
			flags.VisitAll(func(f *pflag.Flag) { seen[f.Name] = true })
		}
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(root)
	for name, values := range choices {
		if !seen[name] {
			t.Errorf("no command has a flag --%s", name)
		}
		for _, value := range append(slices.Clone(values), "nonsense") {
			args := []string{"dev", "--" + name, value}
			if name == "state" || name == "kind" {
				args = append([]string{"outbox", "ls", "--db", t.TempDir() + "/none.db"}, args[1:]...)
			}
			_, err := run(t, args...)
			if _, usage := errors.AsType[*UsageError](err); usage != (value == "nonsense") {
				t.Errorf("%q: %v", args, err)
			}
		}
	}
}

func TestCompletionScripts(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish"} {
		var out bytes.Buffer
		a, root, _ := tree(&out)
		root.SetArgs([]string{"completion", shell})
		if err := a.Execute(t.Context(), root); err != nil || !strings.Contains(out.String(), "__complete") {
			t.Errorf("%s: %v, %.100q", shell, err, out.String())
		}
	}
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("disk full") }

func TestHelpThatCannotBeWrittenIsAnError(t *testing.T) {
	for _, args := range [][]string{{"--help"}, {"runs", "tail", "--help"}, {"help", "send"}, {}, {"completion", "fish"}} {
		a := &App{Stdin: strings.NewReader(""), Stdout: full{}, Stderr: full{}}
		root := a.Root(a.Send(), a.Runs(func(f func(context.Context, Tail) error) func(context.Context, Tail) error { return f }))
		root.SetArgs(args)
		if err := a.Execute(t.Context(), root); err == nil || err.Error() != "disk full" {
			t.Errorf("%q: %v", args, err)
		}
	}
}

func TestHelpOfACommandThatDoesNotExist(t *testing.T) {
	for _, words := range []string{"help nosuch", "help runs nosuch", "help send counter"} {
		if _, err := run(t, strings.Fields(words)...); err == nil {
			t.Errorf("%s: no error", words)
		} else if _, usage := errors.AsType[*UsageError](err); !usage {
			t.Errorf("%s: %v", words, err)
		}
	}
	if _, err := run(t, "help", "runs", "tail"); err != nil {
		t.Error(err)
	}
}
