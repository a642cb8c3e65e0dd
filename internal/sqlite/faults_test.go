//go:build faults

package sqlite

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// traced runs a program under strace and returns its lines and its trace. Counts of when= are per thread.
func traced(t *testing.T, program, path, killAt string, flags ...string) (lines []string, trace string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "trace")
	cmd := command(t, program, path)
	strace, err := exec.LookPath("strace")
	if err != nil {
		t.Fatal(err) // no skip: without it these guarantees are not tested
	}
	cmd.Env = append(cmd.Env, "POSTRIDER_TEST_KILL_AT="+killAt)
	cmd.Path, cmd.Args = strace, append(append([]string{"strace", "-f", "-y", "-qq", "-o", file}, flags...), cmd.Args...)
	out, err := cmd.Output()
	b, rerr := os.ReadFile(file)
	if rerr != nil {
		t.Fatal(rerr)
	}
	if cmd.ProcessState.ExitCode() > 0 {
		t.Fatalf("%s: %v\n%s", program, err, out)
	}
	return strings.Split(strings.TrimSpace(string(out)), "\n"), string(b)
}

func existing(t *testing.T) string {
	t.Helper()
	path := newPath(t)
	s, err := Open(t.Context(), path, rowsSchema, Options{Create: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return path
}

// checkAnswers compares what a program was told about its rows with what the next process finds.
func checkAnswers(t *testing.T, path string, lines []string) (in, not int) {
	t.Helper()
	s := open(t, path, Options{})
	for _, l := range lines {
		var word string
		var n int64
		if _, err := fmt.Sscan(l, &word, &n); err != nil {
			continue
		}
		switch there := has(t, s, n); word {
		case "in":
			if in++; !there {
				t.Errorf("row %d was answered as in and is gone", n)
			}
		case "not":
			if not++; there {
				t.Errorf("row %d is there; the answer was %q", n, l)
			}
		default:
			t.Errorf("unexpected: %s", l)
		}
	}
	if n := number(t, s, "SELECT count(*) FROM row"); n != int64(in) {
		t.Errorf("%d rows, %d were answered as in", n, in)
	}
	var check string
	if err := s.Reader().QueryRow("PRAGMA integrity_check").Scan(&check); err != nil || check != "ok" {
		t.Errorf("integrity: %s, %v", check, err)
	}
	return in, not
}

func TestAnswersAreTrueWhenTheDiskFails(t *testing.T) {
	for _, c := range []struct{ name, inject string }{
		{"fsync fails", "fdatasync:error=EIO:when=4+7"},
		{"fsync fails three times in a row", "fdatasync:error=EIO:when=6..8"},
		{"fsync finds no room", "fdatasync:error=ENOSPC:when=5+9"},
		{"write fails", "pwrite64:error=EIO:when=20+401"},
		{"write finds no room", "pwrite64:error=ENOSPC:when=20+401"},
		{"most writes find no room", "pwrite64:error=ENOSPC:when=60+7"},
	} {
		for _, end := range []string{"", "end"} { // a Close, or a crash after which the WAL is read anew
			t.Run(c.name+", "+end, func(t *testing.T) {
				path := existing(t)
				lines, trace := traced(t, "group", path, end, "-P", path+"-wal", "-e", "trace=fdatasync,pwrite64", "-e", "inject="+c.inject)
				in, not := checkAnswers(t, path, lines)
				t.Logf("%d in, %d not; %d faults", in, not, strings.Count(trace, "(INJECTED)"))
				if in+not != 8*40 || in == 0 || !strings.Contains(trace, "(INJECTED)") {
					t.Errorf("%d in, %d not; trace:\n%s", in, not, trace)
				}
			})
		}
	}
}

// What was answered as not in stays out, although its frames stand in the WAL and the process dies at once. Nor does the
// writer itself take them for good when it reopens a file that nobody else has open, not even while its fsyncs go on
// failing: that would be an answer too, but one that rests on pages the kernel may hold as clean.
func TestFailedFsyncIsNotIn(t *testing.T) {
	for _, when := range []string{"9", "9..14"} {
		path := existing(t)
		lines, _ := traced(t, "write", path, "not", "-P", path+"-wal", "-e", "trace=fdatasync", "-e", "inject=fdatasync:error=EIO:when="+when)
		if in, not := checkAnswers(t, path, lines); not != 1 {
			t.Errorf("when %s: %d in, %d not", when, in, not)
		}
	}
}

// syscalls lists what matters of a trace, in order: sync, write or fault of wal, db or other, and the program's lines.
func syscalls(trace string) (list []string) {
	call := regexp.MustCompile(`^(\d+) +(fdatasync|pwrite64|write)\((\d+)<([^>]*)>(?:, "([^"]*)")?`)
	back := regexp.MustCompile(`^(\d+) +<\.\.\. (fdatasync|pwrite64) resumed>`)
	file := func(path string) string {
		switch {
		case strings.HasSuffix(path, ".db-wal"):
			return "wal"
		case strings.HasSuffix(path, ".db"):
			return "db"
		}
		return "other" // -shm, the folder
	}
	pending := map[string]string{}
	for _, l := range strings.Split(trace, "\n") {
		var what, path string
		if m := call.FindStringSubmatch(l); m != nil {
			if m[2] == "write" {
				if m[3] == "1" {
					list = append(list, strings.TrimSuffix(m[5], `\n`))
				}
				continue
			}
			what, path = m[2], m[4]
			if strings.Contains(l, "<unfinished") {
				pending[m[1]] = path
				continue
			}
		} else if m := back.FindStringSubmatch(l); m != nil {
			what, path = m[2], pending[m[1]]
		} else {
			continue
		}
		switch {
		case strings.Contains(l, "(INJECTED)"):
			list = append(list, "fault "+file(path))
		case strings.Contains(l, "= -1"):
		case what == "fdatasync":
			list = append(list, "sync "+file(path))
		default:
			list = append(list, "write "+file(path))
		}
	}
	return list
}

// checkOrder holds a program that writes row by row to its trace: between two answers lies an fsync of the WAL that
// went well, and none that failed after it.
func checkOrder(t *testing.T, list []string) (answers int) {
	t.Helper()
	synced, written := false, false
	for i, l := range list {
		switch word, _, _ := strings.Cut(l, " "); {
		case l == "write wal":
			written, synced = true, false
		case l == "fault wal":
			synced = false
		case l == "sync wal":
			synced = true
		case word == "in", word == "not", word == "open":
			if !synced || !written {
				t.Errorf("answered before its fsync: %q", list[max(0, i-12):i+1])
			}
			synced, written = false, false
			answers++
		}
	}
	return answers
}

func TestNothingIsAnsweredBeforeItsFsync(t *testing.T) {
	for _, inject := range []string{"", "fdatasync:error=EIO:when=9..12", "fdatasync:error=EIO:when=5+6"} {
		path := existing(t)
		flags := []string{"-e", "trace=fdatasync,pwrite64,write"}
		if inject != "" {
			flags = append(flags, "-e", "inject="+inject)
		}
		lines, trace := traced(t, "write", path, "", flags...)
		list := syscalls(trace)
		if n := checkOrder(t, list); n != 101 || strings.Contains(trace, "(INJECTED)") != (inject != "") {
			t.Errorf("%s: %d answers in the trace of %d calls", inject, n, len(list))
		}
		checkAnswers(t, path, lines)
	}
}

// A process dies inside an fsync, or after one that failed; the next one sees a row that may not be on disk. It is in
// the main file, and synced, before Open returns.
func TestOpenMakesDurableWhatADeadProcessLeft(t *testing.T) {
	for _, c := range []struct{ name, killAt, inject string }{
		{"killed inside an fsync", "", "fdatasync:signal=KILL:when=3"},
		{"killed inside a later fsync", "", "fdatasync:signal=KILL:when=17"},
		{"died after a failed fsync", "reconnect", "fdatasync:error=EIO:when=11"},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := existing(t)
			lines, _ := traced(t, "write", path, c.killAt, "-P", path+"-wal", "-e", "trace=fdatasync", "-e", "inject="+c.inject)
			in := strings.Count(strings.Join(lines, "\n"), "in ")
			if in == 100 {
				t.Fatal("nothing happened")
			}
			lines, trace := traced(t, "open", path, "", "-e", "trace=fdatasync,pwrite64,write")
			if want := fmt.Sprintf("open %d", in+1); lines[0] != want {
				t.Errorf("the next process says %q, want %q: one row more than was answered", lines[0], want)
			}
			list := strings.Join(syscalls(trace), "\n")
			before, _, _ := strings.Cut(list, "\nopen ")
			copied := strings.LastIndex(before, "write db")
			if copied < 0 || !strings.Contains(before[copied:], "sync db") {
				t.Errorf("not in the main file before Open returned:\n%s", list)
			}
			committed := strings.LastIndex(before, "write wal")
			if committed < copied || !strings.Contains(before[committed:], "sync wal") {
				t.Errorf("no commit before Open returned:\n%s", list)
			}
		})
	}
}

func TestEpochIsOnDiskBeforeTheDatabase(t *testing.T) {
	path := newPath(t)
	_, trace := traced(t, "create", path, "", "-e", "trace=fsync,rename,renameat,renameat2,pwrite64")
	rest := trace
	for _, step := range []string{
		`fsync\(\d+<[^>]*/test\.db\.epoch\.\d+>.* = 0`, // its content
		`rename.*/test\.db\.epoch".* = 0`,
		`fsync\(\d+<[^>]*/\d+>.* = 0`, // its folder
		`pwrite64\(\d+<[^>]*/test\.db-wal>`,
	} {
		at := regexp.MustCompile(step).FindStringIndex(rest)
		if at == nil {
			t.Fatalf("no %s in its place:\n%s", step, trace)
		}
		if strings.Contains(rest[:at[0]], "/test.db-wal>") {
			t.Fatalf("the database came before %s:\n%s", step, trace)
		}
		rest = rest[at[1]:]
	}
}

// What a dead process left in the WAL does not fit the main file: it stays where it is, and people can make room.
func TestFullDiskDoesNotKeepOpenFromWorking(t *testing.T) {
	path := existing(t)
	traced(t, "write", path, "", "-P", path+"-wal", "-e", "trace=fdatasync", "-e", "inject=fdatasync:signal=KILL:when=9")
	lines, trace := traced(t, "open", path, "", "-P", path, "-e", "trace=pwrite64", "-e", "inject=pwrite64:error=ENOSPC:when=1+")
	if !strings.HasPrefix(lines[0], "open ") || lines[0] == "open 0" || !strings.Contains(trace, "(INJECTED)") {
		t.Errorf("said %q; trace:\n%s", lines, trace)
	}
}
