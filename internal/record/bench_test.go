package record

import (
	"encoding/json"
	"strings"
	"testing"
)

// sized is a full event with 300 bytes of data.
func sized() Record {
	r := full()
	r.Data = []byte(`{"reading":{"line":"line-1","temperature":21.75,"tags":["a","b"]},"note":"`)
	r.Data = append(r.Data, strings.Repeat("x", 300-len(r.Data)-2)+`"}`...)
	return r
}

func BenchmarkAppendCloudEvent(b *testing.B) {
	r := sized()
	dst := r.AppendCloudEvent(nil)
	b.SetBytes(int64(len(dst)))
	b.ReportAllocs()
	for b.Loop() {
		dst = r.AppendCloudEvent(dst[:0])
	}
}

// The two readings of the same bytes; encoding/json's alone is what a decoder on top of it would start from.
func BenchmarkParseCloudEvent(b *testing.B) {
	r := sized()
	in := r.AppendCloudEvent(nil)
	b.Run("postrider", func(b *testing.B) {
		b.SetBytes(int64(len(in)))
		b.ReportAllocs()
		for b.Loop() {
			if _, err := ParseCloudEvent(in); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("encoding-json", func(b *testing.B) {
		b.SetBytes(int64(len(in)))
		b.ReportAllocs()
		for b.Loop() {
			var attributes map[string]json.RawMessage
			if err := json.Unmarshal(in, &attributes); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkContentHash(b *testing.B) {
	r := sized()
	b.ReportAllocs()
	for b.Loop() {
		ContentHash(&r)
	}
}

func BenchmarkTopicsParse(b *testing.B) {
	var s Topics
	topic := s.Events("default", "edge-1", "order-9")
	b.ReportAllocs()
	for b.Loop() {
		if _, err := s.Parse(topic); err != nil {
			b.Fatal(err)
		}
	}
}

func TestHotPathsDoNotAllocate(t *testing.T) {
	for name, r := range events() {
		dst := r.AppendCloudEvent(nil)
		if n := testing.AllocsPerRun(100, func() { dst = r.AppendCloudEvent(dst[:0]) }); n != 0 {
			t.Errorf("%s: AppendCloudEvent allocates %v times", name, n)
		}
		if n := testing.AllocsPerRun(100, func() { ContentHash(&r) }); n != 0 {
			t.Errorf("%s: ContentHash allocates %v times", name, n)
		}
	}
}
