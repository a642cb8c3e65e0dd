package cli

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"sync"

	"github.com/spf13/cobra"
)

// Demo is what the demo is told.
type Demo struct {
	JSON  bool // only the figures
	Plain bool // log lines share the terminal
	Keep  bool // both databases
}

// Demo is `demo`; run shows it.
func (a *App) Demo(run func(ctx context.Context, d Demo) error) *cobra.Command {
	var d Demo
	c := &cobra.Command{
		Use:   "demo",
		Short: "Show in ten seconds what Postrider promises",
		Long: `Run a node, a broker and a fold in this process, in a temporary folder: eight runs of the built-in agent finish while the
broker is down; then it comes back, and while everything is shipped PUBACKs get lost, the relay panics, and a run is
rewound. At the end both databases are compared record by record. Exit code 1 when anything is lost, counted twice or out
of order.

Nothing outside that folder is read or written, so --db and --tenant are refused. With -o json only the figures are
printed. The parts log nothing unless --log-level is given, or something fails.`,
		Example: "  postrider demo\n  postrider demo --keep\n  postrider demo -o json",
		Args:    a.without(a.noArgs, "db", "tenant"),
	}
	c.Flags().BoolVar(&d.Keep, "keep", false, "leave the folder with both databases, and say how to look into them")
	c.RunE = func(c *cobra.Command, _ []string) error {
		d.JSON = a.output != "table"
		var lines firstLines
		if d.Plain = c.Flags().Changed("log-level"); !d.Plain {
			a.Log = slog.New(slog.NewTextHandler(&lines, &slog.HandlerOptions{Level: slog.LevelWarn}))
		}
		err := run(c.Context(), d)
		if stdout := (*os.PathError)(nil); err != nil && !(errors.As(err, &stdout) && stdout.Path == os.Stdout.Name()) {
			_, _ = a.Stderr.Write(lines.b.Bytes())
		}
		return err
	}
	return c
}

// firstLines keeps the first lines that are written to it.
type firstLines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *firstLines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.b.Len() < 16<<10 {
		l.b.Write(p)
	}
	return len(p), nil
}
