package demo

import (
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// pty is a terminal, as a program sees it.
func pty(t *testing.T, columns uint16) *os.File {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { master.Close() })
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := unix.IoctlSetWinsize(int(f.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: columns}); err != nil {
		t.Fatal(err)
	}
	return f
}

func TestColourAndRedrawingAreForTerminals(t *testing.T) {
	for _, c := range []struct {
		term, noColor  string
		noRedraw       bool
		redraw, colour bool
	}{
		{term: "xterm-256color", redraw: true, colour: true},
		{term: "xterm", noColor: "1", redraw: true},
		{term: "xterm", noRedraw: true, colour: true},
		{term: "dumb"}, {term: ""},
	} {
		env := func(name string) string { return map[string]string{"TERM": c.term, "NO_COLOR": c.noColor}[name] }
		s := newScreen(pty(t, 66), env, c.noRedraw)
		if s.redraw != c.redraw || s.colour != c.colour || s.width() != 65 {
			t.Errorf("%+v: redrawn %t, in colour %t, width %d", c, s.redraw, s.colour, s.width())
		}
		file, err := os.Create(t.TempDir() + "/out")
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		if s := newScreen(file, env, c.noRedraw); s.redraw || s.colour || s.width() != 79 {
			t.Errorf("%+v, a file: redrawn %t, in colour %t, width %d", c, s.redraw, s.colour, s.width())
		}
	}
}
