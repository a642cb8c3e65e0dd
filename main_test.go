package main

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"postrider/internal/mqtt"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"postrider": main})
}

// TestScript runs the real main by the scripts in testdata/script. Beyond testscript's own they have these commands:
//
//	exits CODE CMD…          CMD ends with this code and leaves one line, and at most one hint, on stderr after the log; nothing on stdout
//	eventually DUR RE CMD…   CMD, asked again and again, succeeds within DUR with RE in its output
//	free NAME                $NAME is 127.0.0.1 and a port that was free a moment ago
//	taken NAME               $NAME is 127.0.0.1 and a port that is taken until the script ends
//	foreign FILE             makes an SQLite database that is not Postrider's
//	newer FILE               makes FILE the work of a later version
//	fetch DUR CODE RE URL [JSON [HEADER…]]
//	                         GET URL, or POST of JSON to it, asked again and again, answers CODE within DUR with RE in its
//	                         body, which is $WORK/body then; JSON '' is none, a HEADER is 'Name: value'
//	publish ADDR TOPIC PAYLOAD
//	                         sends a message to the broker at ADDR, which acknowledges it
//	terminate                sends SIGTERM to all background commands
func TestScript(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(env *testscript.Env) error {
			agents, err := filepath.Abs("testdata/agents")
			env.Setenv("AGENTS", agents)
			env.Setenv("POSTRIDER_LISTEN", "127.0.0.1:0") // several run at once
			env.Setenv("GORACE", "atexit_sleep_ms=0")     // else every command takes a second to end
			return err
		},
		Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){
			"exits": exits, "eventually": eventually, "free": free, "taken": taken, "foreign": foreign, "newer": newer, "fetch": fetch, "publish": publish, "terminate": terminate,
		},
	})
}

var errorLines = regexp.MustCompile(`^(time=[^\n]+\n)*postrider: [^\n]+\n(hint: [^\n]+\n)?$`) // after the log

func exits(ts *testscript.TestScript, _ bool, args []string) {
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	code := 0
	if err := ts.Exec(args[1], args[2:]...); err != nil {
		exit, ok := errors.AsType[*exec.ExitError](err)
		if !ok {
			ts.Check(err)
		}
		code = exit.ExitCode()
	}
	stdout, stderr := ts.ReadFile("stdout"), ts.ReadFile("stderr")
	switch {
	case code != want:
		ts.Fatalf("exit code %d, not %d", code, want)
	case code == 0:
	case stdout != "":
		ts.Fatalf("a command that failed wrote to stdout: %q", stdout)
	case !errorLines.MatchString(stderr):
		ts.Fatalf("not one line and at most one hint: %q", stderr)
	}
}

func eventually(ts *testscript.TestScript, _ bool, args []string) {
	limit, err := time.ParseDuration(args[0])
	ts.Check(err)
	want, err := regexp.Compile(args[1])
	ts.Check(err)
	deadline := time.After(limit)
	again := time.NewTicker(50 * time.Millisecond)
	defer again.Stop()
	for {
		err := ts.Exec(args[2], args[3:]...)
		if err == nil && want.MatchString(ts.ReadFile("stdout")) {
			return
		}
		select {
		case <-again.C:
		case <-deadline:
			ts.Fatalf("no %q within %s: %v", want, limit, err)
		}
	}
}

func free(ts *testscript.TestScript, _ bool, args []string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	ts.Check(err)
	ts.Setenv(args[0], l.Addr().String())
	ts.Check(l.Close())
}

func taken(ts *testscript.TestScript, _ bool, args []string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	ts.Check(err)
	ts.Defer(func() { l.Close() })
	ts.Setenv(args[0], l.Addr().String())
}

func foreign(ts *testscript.TestScript, _ bool, args []string) {
	alter(ts, args[0], "CREATE TABLE theirs (x)")
}

func newer(ts *testscript.TestScript, _ bool, args []string) {
	alter(ts, args[0], "PRAGMA user_version = 1000")
}

func alter(ts *testscript.TestScript, file, statement string) {
	db, err := sql.Open("sqlite", ts.MkAbs(file))
	ts.Check(err)
	_, err = db.Exec(statement)
	ts.Check(errors.Join(err, db.Close()))
}

func fetch(ts *testscript.TestScript, _ bool, args []string) {
	limit, err := time.ParseDuration(args[0])
	ts.Check(err)
	code, err := strconv.Atoi(args[1])
	ts.Check(err)
	want, err := regexp.Compile("(?m)" + args[2])
	ts.Check(err)
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	for last := ""; ; {
		status, body, err := ask(ctx, args[3], args[4:]...)
		if err == nil && status == code && want.Match(body) {
			ts.Check(os.WriteFile(ts.MkAbs("body"), body, 0o644))
			return
		}
		if ctx.Err() != nil {
			ts.Fatalf("no %d with %q within %s: %s", code, want, limit, last)
		}
		if last = fmt.Sprintf("%d %s", status, body); err != nil {
			last = err.Error()
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

func publish(ts *testscript.TestScript, _ bool, args []string) {
	c, err := mqtt.Dial(context.Background(), mqtt.Options{Broker: args[0], ClientID: "publish-" + filepath.Base(ts.Getenv("WORK"))})
	ts.Check(err)
	defer c.Close()
	d := c.Publish(args[1], false, []byte(args[2]))
	select {
	case <-d.Done():
		ts.Check(d.Error())
	case <-time.After(20 * time.Second):
		ts.Fatalf("no PUBACK for %s", args[1])
	}
}

func ask(ctx context.Context, url string, more ...string) (code int, body []byte, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if len(more) > 0 && more[0] != "" {
		req, err = http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(more[0]))
	}
	if err != nil {
		return 0, nil, err
	}
	if req.Method == http.MethodPost {
		req.Header.Set("Content-Type", "application/json")
	}
	for _, header := range more[min(1, len(more)):] {
		name, value, _ := strings.Cut(header, ": ")
		req.Header.Set(name, value)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	body, err = io.ReadAll(resp.Body)
	return resp.StatusCode, body, err
}

func terminate(ts *testscript.TestScript, _ bool, _ []string) {
	for _, c := range ts.BackgroundCmds() {
		ts.Check(c.Process.Signal(syscall.SIGTERM))
	}
}

func TestSecondSignal(t *testing.T) {
	for _, c := range []struct {
		s     os.Signal
		after time.Duration
		want  bool
	}{
		{syscall.SIGINT, time.Millisecond, false}, {syscall.SIGINT, time.Second, true},
		{syscall.SIGTERM, time.Millisecond, true}, {syscall.SIGTERM, time.Second, true},
	} {
		if got := another(syscall.SIGINT, c.s, c.after); got != c.want {
			t.Errorf("%v after %v: %t", c.s, c.after, got)
		}
	}
}

// TestBuildsWithoutCgo: one static binary is the promise.
func TestBuildsWithoutCgo(t *testing.T) {
	if testing.Short() {
		t.Skip("builds everything once more")
	}
	binary := filepath.Join(t.TempDir(), "postrider")
	build := exec.Command("go", "build", "-o", binary, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	out, err := exec.Command(binary, "version", "-o", "json").Output()
	if err != nil || !bytes.Contains(out, []byte(runtime.Version())) {
		t.Fatalf("version: %v: %q", err, out)
	}
}

// source is one package of the module, without its tests.
type source struct {
	docs    []string // files with a package comment
	name    string
	imports map[string]string // to one file that has it
}

// sources reads all packages whatever system their files are for, by path below the module.
func sources(t *testing.T) map[string]*source {
	t.Helper()
	all := map[string]*source{}
	err := filepath.WalkDir(".", func(file string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && file != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata"):
			return filepath.SkipDir
		case d.IsDir() || !strings.HasSuffix(file, ".go") || strings.HasSuffix(file, "_test.go"):
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly|parser.ParseComments)
		if err != nil {
			return err
		}
		dir := path.Dir(filepath.ToSlash(file))
		s := all[dir]
		if s == nil {
			s = &source{name: f.Name.Name, imports: map[string]string{}}
			all[dir] = s
		}
		if f.Doc != nil {
			s.docs = append(s.docs, file)
		}
		for _, spec := range f.Imports {
			name, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return err
			}
			s.imports[name] = file
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// arrows are all imports between packages that there may be; "." is main, which may import everything. A package that is
// missing here fails the test, so that nobody forgets to decide. Test helpers are imported by tests only.
var arrows = map[string][]string{
	"internal/cli":       {"executor", "outbox", "fold", "internal/record", "internal/sqlite"},
	"executor":           {"outbox", "internal/agent", "internal/record", "internal/sqlite"},
	"relay":              {"outbox", "internal/record", "internal/mqtt"},
	"outbox":             {"internal/record", "internal/sqlite"},
	"fold":               {"internal/record", "internal/mqtt", "internal/sqlite"},
	"internal/kind":      {"internal/agent"},
	"internal/agent":     {},
	"internal/record":    {},
	"internal/sqlite":    {},
	"internal/mqtt":      {},
	"internal/demo":      {"executor", "fold", "outbox", "relay", "internal/agent", "internal/devbroker", "internal/kind", "internal/mqtt", "internal/record", "internal/sqlite"},
	"internal/devbroker": {},
	"internal/mqtttest":  {},
	"internal/httpapi":   {"executor", "internal/record", "internal/sqlite"},
}

// onlyImporters are the packages that may import what is outside, where one package stands for one technology.
var onlyImporters = map[string][]string{
	"modernc.org/":                  {"internal/sqlite"},
	"github.com/eclipse/paho.mqtt":  {"internal/mqtt"},
	"github.com/mochi-mqtt/":        {"internal/devbroker"},
	"github.com/spf13/":             {"internal/cli"},
	"golang.org/x/term":             {"internal/demo"},
	"github.com/oklog/run":          {".", "relay"},
	"os/signal":                     {"."},
	"os/exec":                       {"internal/kind"},
	"net/http":                      {"internal/httpapi", "internal/mqtt"}, // there for websockets
	"github.com/cloudevents/sdk-go": nil,                                   // an independent reader, for tests
}

// TestImportArrows holds what a package may know of; README has the packages.
func TestImportArrows(t *testing.T) {
	all := sources(t)
	for dir, s := range all {
		may, known := arrows[dir]
		if !known && dir != "." {
			t.Errorf("package %s: which packages may it import? Say so in arrows", dir)
			continue
		}
		for name, file := range s.imports {
			if inner, ok := strings.CutPrefix(name, "postrider/"); ok && dir != "." && !slices.Contains(may, inner) {
				t.Errorf("%s: %s must not import %s", file, dir, inner)
			}
			for outside, importers := range onlyImporters {
				if strings.HasPrefix(name, outside) && !slices.Contains(importers, dir) {
					t.Errorf("%s: %s must not import %s", file, dir, name)
				}
			}
			if standard := !strings.Contains(strings.SplitN(name, "/", 2)[0], "."); dir == "internal/agent" && !standard {
				t.Errorf("%s: the contract with agents is the standard library's alone, not %s", file, name)
			}
		}
	}
	for dir := range arrows {
		if all[dir] == nil {
			t.Errorf("arrows has %s, which does not exist", dir)
		}
	}
	for _, pair := range [][2]string{{"executor", "relay"}, {"executor", "internal/mqtt"}, {"relay", "executor"}} {
		if slices.Contains(reach(all, pair[0]), pair[1]) {
			t.Errorf("%s reaches %s", pair[0], pair[1])
		}
	}
}

// reach lists the module's packages that dir imports, directly or not.
func reach(all map[string]*source, dir string) []string {
	var list []string
	for name := range all[dir].imports {
		if inner, ok := strings.CutPrefix(name, "postrider/"); ok {
			list = append(append(list, inner), reach(all, inner)...)
		}
	}
	return list
}

func TestPackageComments(t *testing.T) {
	for dir, s := range sources(t) {
		if len(s.docs) != 1 {
			t.Errorf("package %s (%s): one file has the package comment, not %d %v", s.name, dir, len(s.docs), s.docs)
		}
	}
}

// TestLibcOfSQLite: modernc.org/sqlite works with exactly the libc that it was built with.
func TestLibcOfSQLite(t *testing.T) {
	wanted := func(module string) string {
		out, err := exec.Command("go", "list", "-m", "-f", "{{.GoMod}} {{.Version}}", module).Output()
		if err != nil {
			t.Fatalf("go list %s: %v", module, err)
		}
		return strings.TrimSpace(string(out))
	}
	mod, _, _ := strings.Cut(wanted("modernc.org/sqlite"), " ")
	_, libc, _ := strings.Cut(wanted("modernc.org/libc"), " ")
	b, err := os.ReadFile(mod)
	if err != nil {
		t.Fatal(err)
	}
	if !regexp.MustCompile(`(?m)^\s*(require )?modernc\.org/libc ` + regexp.QuoteMeta(libc) + `$`).Match(b) {
		t.Errorf("modernc.org/libc is %s, which is not what modernc.org/sqlite asks for in %s", libc, mod)
	}
}
