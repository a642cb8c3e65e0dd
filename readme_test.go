package main

import (
	"errors"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"postrider/internal/cli"
)

// TestReadmeNamesWhatExists: tests, files, commands, flags and metrics that README.md names are there, and all commands and
// metrics there are have a place in it.
func TestReadmeNamesWhatExists(t *testing.T) {
	b, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	page := string(b)
	if n := strings.Count(page, "\n"); n > 200 {
		t.Errorf("%d lines: nobody reads that many", n)
	}
	section := func(name string) string {
		t.Helper()
		_, after, ok := strings.Cut(page, "\n## "+name+"\n")
		if !ok {
			t.Fatalf("no section %q", name)
		}
		text, _, _ := strings.Cut(after, "\n## ")
		return text
	}
	quoted := func(text, re string) (all []string) {
		for _, m := range regexp.MustCompile("`"+re+"`").FindAllStringSubmatch(text, -1) {
			all = append(all, m[1])
		}
		return all
	}

	t.Run("tests", func(t *testing.T) {
		real, marked := map[string]bool{}, map[string]bool{} // marked: not for Go alone
		err := filepath.WalkDir(".", func(file string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(file, "_test.go") {
				return err
			}
			source, err := os.ReadFile(file)
			for _, m := range regexp.MustCompile(`(?m)^func (Test\w+)\(`).FindAllSubmatch(source, -1) {
				real[string(m[1])] = true
				marked[string(m[1])] = regexp.MustCompile(`(?m)^//go:build.*faults`).Match(source)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		names := quoted(page, `(Test[\w/]+)`)
		if len(names) < 30 {
			t.Errorf("only %d tests are named", len(names))
		}
		for _, name := range names {
			if script, ok := strings.CutPrefix(name, "TestScript/"); ok {
				if _, err := os.Stat(filepath.Join("testdata/script", script+".txtar")); err != nil {
					t.Error(err)
				}
			} else if !real[name] {
				t.Errorf("there is no %s", name)
			} else if strings.Contains(page, "`"+name+"`*") != marked[name] {
				t.Errorf("%s: the mark is wrong", name)
			}
		}
	})

	t.Run("files", func(t *testing.T) {
		names := quoted(page, `(\.?\w+/[\w/.-]+|\w+\.(?:go|sql))`)
		if len(names) < 20 {
			t.Errorf("only %d files are named", len(names))
		}
		for _, name := range names {
			if strings.HasPrefix(name, "Test") {
				continue
			}
			if _, err := os.Stat(name); err != nil {
				t.Error(err)
			}
		}
		for _, m := range regexp.MustCompile("(?m)^[0-9]\\. `([^`]+)`: (.*)").FindAllStringSubmatch(page, -1) {
			source, err := os.ReadFile(m[1])
			for _, name := range quoted(m[2], `(\w+)`) {
				if !regexp.MustCompile(`(?m)^func (\([^)]*\) )?` + name + `\(`).Match(source) {
					err = errors.Join(err, errors.New(m[1]+" has no "+name))
				}
			}
			if err != nil {
				t.Error(err)
			}
		}
	})

	app := &cli.App{Stdin: strings.NewReader(""), Stdout: io.Discard, Stderr: io.Discard}
	root := app.Root(app.Demo(nil), app.Dev(nil), app.Serve(nil), app.Relay(nil), app.Send(), app.Runs(untilSignal[cli.Tail]), app.Rewind(), app.Inbox(),
		app.Outbox(), app.Fold(nil), app.Version())
	t.Run("commands", func(t *testing.T) {
		table := section("Commands")
		listed := map[string]bool{}
		for _, name := range quoted(table, `([a-z]+(?: [a-z]+)?)[^`+"`"+`]*`) {
			listed[name] = true
		}
		var walk func(c *cobra.Command, above string)
		walk = func(c *cobra.Command, above string) {
			for _, sub := range c.Commands() {
				name := strings.TrimSpace(above + " " + sub.Name())
				if sub.Runnable() && !sub.HasParent() || len(sub.Commands()) == 0 && sub.Name() != "help" && above != "completion" {
					if !listed[name] {
						t.Errorf("command %q is missing in the table", name)
					}
				}
				walk(sub, name)
			}
		}
		walk(root, "")
		// Lines to type, with the flags in them.
		lines := regexp.MustCompile(`(?m)^(?:go run \.|\./postrider) ([^#\n]*)`).FindAllStringSubmatch(page, -1)
		if len(lines) < 8 {
			t.Errorf("only %d commands to type", len(lines))
		}
		for _, m := range lines {
			words := strings.Fields(m[1])
			c, _, err := root.Find(words)
			if err != nil || c == root {
				t.Errorf("%s: %v", m[1], err)
				continue
			}
			for _, w := range words {
				if flag, ok := strings.CutPrefix(w, "--"); ok && c.Flags().Lookup(flag) == nil && c.InheritedFlags().Lookup(flag) == nil {
					t.Errorf("%s: no flag %s", m[1], w)
				}
			}
		}
	})

	t.Run("metrics", func(t *testing.T) {
		_, text, _ := strings.Cut(section("Metrics and health"), "All metrics, each `postrider_…`:")
		want := slices.Sorted(maps.Keys(realMetrics(t)))
		got := quoted(text, `(\w+)`)
		for i := range got {
			got[i] = "postrider_" + got[i]
		}
		if slices.Sort(got); !slices.Equal(got, want) {
			t.Errorf("README has %v\nthere are %v", got, want)
		}
	})

	t.Run("packages", func(t *testing.T) {
		listed := quoted(section("Architecture"), `(\w+(?:/\w+)?)`)
		for dir, s := range sources(t) {
			if s.name != "main" && !slices.Contains(listed, dir) && !strings.HasSuffix(path.Base(dir), "test") {
				t.Errorf("package %s is missing", dir)
			}
		}
	})
}
