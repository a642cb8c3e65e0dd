package cli

import (
	"bytes"
	"log/slog"
	"testing"
)

func TestWarningsAreHeldBack(t *testing.T) {
	var out bytes.Buffer
	log, say := holdBack(slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}})))
	log = log.With("component", "store").WithGroup("g")
	log.Warn("the disk is too full", "n", 1)
	log.Debug("no")
	log.Error("fate of a commit is unknown")
	const failed = "level=ERROR msg=\"fate of a commit is unknown\" component=store\n"
	if out.String() != failed {
		t.Errorf("before say: %s", out.String())
	}
	say()
	say()
	if want := failed + "level=WARN msg=\"the disk is too full\" component=store g.n=1\n"; out.String() != want {
		t.Errorf("after say: %s", out.String())
	}
}
