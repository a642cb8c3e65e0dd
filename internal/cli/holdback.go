package cli

import (
	"context"
	"log/slog"
	"sync"
)

// holdBack gives a logger that keeps warnings until say: a command that fails of what it was warned of says so in its one
// error line, and nothing else. All other lines pass.
func holdBack(log *slog.Logger) (held *slog.Logger, say func()) {
	kept := &keptLines{}
	return slog.New(holder{log.Handler(), kept}), kept.say
}

type keptLines struct {
	mu    sync.Mutex
	lines []func()
}

func (k *keptLines) say() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, line := range k.lines {
		line()
	}
	k.lines = nil
}

type holder struct {
	slog.Handler
	kept *keptLines
}

func (h holder) Handle(ctx context.Context, r slog.Record) error {
	if r.Level != slog.LevelWarn {
		return h.Handler.Handle(ctx, r)
	}
	h.kept.mu.Lock()
	defer h.kept.mu.Unlock()
	h.kept.lines = append(h.kept.lines, func() { _ = h.Handler.Handle(ctx, r.Clone()) })
	return nil
}

func (h holder) WithAttrs(attrs []slog.Attr) slog.Handler {
	return holder{h.Handler.WithAttrs(attrs), h.kept}
}

func (h holder) WithGroup(name string) slog.Handler {
	return holder{h.Handler.WithGroup(name), h.kept}
}
