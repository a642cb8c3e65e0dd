package sqlite

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func openNode(t *testing.T, path string, o Options) (*Store, error) {
	t.Helper()
	text, err := schemaText()
	if err != nil {
		t.Fatal(err)
	}
	return Open(t.Context(), path, NodeSchema(text, "n1", path), o)
}

func nodeOf(t *testing.T, path string) Node {
	t.Helper()
	s, err := openNode(t, path, Options{Create: true})
	if err != nil {
		t.Fatal(err)
	}
	n, err := ReadNode(t.Context(), s)
	if err := errors.Join(err, s.Close()); err != nil {
		t.Fatal(err)
	}
	return n
}

func TestEpochNeverComesBack(t *testing.T) {
	path := newPath(t)
	start := time.Now().Unix()
	first := nodeOf(t, path)
	if first.Epoch <= start || first.Name != "n1" || !strings.HasPrefix(first.ClientID, "postrider-n1-") {
		t.Errorf("first: %+v, started at %d", first, start)
	}
	if again := nodeOf(t, path); again != first {
		t.Errorf("opened again: %+v, was %+v", again, first)
	}
	remove := func() {
		t.Helper()
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	remove()
	second := nodeOf(t, path) // within the same second
	if second.Epoch <= first.Epoch || second.ClientID == first.ClientID {
		t.Errorf("after the file was deleted: %+v, was %+v", second, first)
	}
	remove()
	writeBytes(t, path+".epoch", fmt.Appendf(nil, `{"epoch":%d,"instance":"x"}`, start+1_000_000_000))
	if third := nodeOf(t, path); third.Epoch != start+1_000_000_001 {
		t.Errorf("after an epoch ahead of the clock: %+v", third)
	}
	b, err := os.ReadFile(path + ".epoch")
	if err != nil || !strings.HasPrefix(string(b), fmt.Sprintf(`{"epoch":%d,"instance":"`, start+1_000_000_001)) || strings.Contains(string(b), `"x"`) {
		t.Errorf("epoch file: %s, %v", b, err)
	}
	if entries, err := os.ReadDir(filepath.Dir(path)); err != nil || len(entries) != 2 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
}

func TestCorruptEpochFileIsAClearError(t *testing.T) {
	for _, content := range []string{"", "{}", "12", "{\"epoch\":", `{"epoch":-1,"instance":"x"}`, `{"epoch":9223372036854775807,"instance":"x"}`, `{"epoch":5}`, "\x00\x00"} {
		path := newPath(t)
		writeBytes(t, path+".epoch", []byte(content))
		_, err := openNode(t, path, Options{Create: true})
		if err == nil || !strings.Contains(err.Error(), path+".epoch") {
			t.Errorf("%q: %v", content, err)
		}
		if b, err := os.ReadFile(path + ".epoch"); err != nil || string(b) != content {
			t.Errorf("%q was changed to %q; %v", content, b, err)
		}
		if _, err := openNode(t, path, Options{}); err == nil {
			t.Errorf("%q: there is a database all the same", content)
		}
	}
}

func TestDatabaseNeedsItsEpochOnDiskFirst(t *testing.T) {
	path := newPath(t)
	if err := os.Mkdir(path+".epoch", 0o700); err != nil { // cannot be replaced by a file
		t.Fatal(err)
	}
	if _, err := openNode(t, path, Options{Create: true}); err == nil {
		t.Error("a database without an epoch file")
	}
	if err := os.Remove(path + ".epoch"); err != nil {
		t.Fatal(err)
	}
	text, err := schemaText()
	if err != nil {
		t.Fatal(err)
	}
	schema := NodeSchema(text, "n1", path)
	_, err = Open(t.Context(), path, schema, Options{Create: true, fault: func(point string) error {
		if point == "filled" {
			if _, err := os.Stat(path + ".epoch"); err != nil {
				t.Error(err)
			}
			return errors.New("died before its COMMIT")
		}
		return nil
	}})
	if err == nil {
		t.Error("no error")
	}
	used, err := os.ReadFile(path + ".epoch")
	if err != nil {
		t.Fatal(err)
	}
	n := nodeOf(t, path)
	if strings.Contains(string(used), fmt.Sprint(n.Epoch)) {
		t.Errorf("epoch %d was given out before: %s", n.Epoch, used)
	}
}

func TestReadNodeOfAnotherKindFails(t *testing.T) {
	if _, err := ReadNode(t.Context(), newStore(t, Options{})); err == nil {
		t.Error("no error")
	}
}

func TestLockIsExclusiveAmongProcesses(t *testing.T) {
	path := filepath.Join(t.TempDir(), "test.db.relay")
	lines, cmd, _ := started(t, "lock", path)
	wantLine(t, lines, "held")
	_, err := TakeLock(path, "me")
	if want := fmt.Sprintf("pid %d", cmd.Process.Pid); !errors.Is(err, ErrLocked) || !strings.HasSuffix(err.Error(), "locked by "+want) {
		t.Errorf("%v, want the words %q", err, want)
	}
	second, secondCmd, _ := started(t, "lock", path)
	wantLine(t, second, "error "+path+": locked by pid ")
	_ = secondCmd.Wait()

	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	l, err := TakeLock(path, "me")
	if err != nil {
		t.Fatalf("after kill -9 of its holder: %v", err)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "me\n" {
		t.Errorf("the lock file says %q, %v", b, err)
	}
	if _, err := TakeLock(path, "me again"); !errors.Is(err, ErrLocked) || !strings.HasSuffix(err.Error(), "by me") {
		t.Errorf("in the same process: %v", err)
	}
	if err := l.Release(); err != nil {
		t.Error(err)
	}
	third, thirdCmd, goOn := started(t, "lock", path)
	wantLine(t, third, "held")
	goOn()
	if err := thirdCmd.Wait(); err != nil {
		t.Error(err)
	}
	if _, err := TakeLock(filepath.Join(path, "x"), "me"); err == nil || errors.Is(err, ErrLocked) {
		t.Errorf("a path that cannot be: %v", err)
	}
}
