"""English prose for the out-of-domain cells of the grid: openings of old novels.

In the public domain: H. Melville, "Moby-Dick" (1851); J. Austen, "Pride and Prejudice"
(1813); C. Dickens, "A Tale of Two Cities" (1859); L. Carroll, "Alice's Adventures in
Wonderland" (1865).
"""

PROSE = """\
Call me Ishmael. Some years ago, never mind how long precisely, having little or no \
money in my purse, and nothing particular to interest me on shore, I thought I would \
sail about a little and see the watery part of the world. It is a way I have of \
driving off the spleen and regulating the circulation. Whenever I find myself \
growing grim about the mouth; whenever it is a damp, drizzly November in my soul; \
whenever I find myself involuntarily pausing before coffin warehouses, and bringing \
up the rear of every funeral I meet; and especially whenever my hypos get such an \
upper hand of me, that it requires a strong moral principle to prevent me from \
deliberately stepping into the street, and methodically knocking people's hats off, \
then, I account it high time to get to sea as soon as I can. This is my substitute \
for pistol and ball. With a philosophical flourish Cato throws himself upon his \
sword; I quietly take to the ship. There is nothing surprising in this. If they but \
knew it, almost all men in their degree, some time or other, cherish very nearly the \
same feelings towards the ocean with me.

It is a truth universally acknowledged, that a single man in possession of a good \
fortune, must be in want of a wife. However little known the feelings or views of \
such a man may be on his first entering a neighbourhood, this truth is so well fixed \
in the minds of the surrounding families, that he is considered as the rightful \
property of some one or other of their daughters. "My dear Mr. Bennet," said his \
lady to him one day, "have you heard that Netherfield Park is let at last?" Mr. \
Bennet replied that he had not. "But it is," returned she; "for Mrs. Long has just \
been here, and she told me all about it." Mr. Bennet made no answer. "Do not you \
want to know who has taken it?" cried his wife impatiently. "You want to tell me, \
and I have no objection to hearing it." This was invitation enough.

It was the best of times, it was the worst of times, it was the age of wisdom, it \
was the age of foolishness, it was the epoch of belief, it was the epoch of \
incredulity, it was the season of Light, it was the season of Darkness, it was the \
spring of hope, it was the winter of despair, we had everything before us, we had \
nothing before us, we were all going direct to Heaven, we were all going direct the \
other way. There were a king with a large jaw and a queen with a plain face, on the \
throne of England; there were a king with a large jaw and a queen with a fair face, \
on the throne of France. In both countries it was clearer than crystal to the lords \
of the State preserves of loaves and fishes, that things in general were settled for \
ever.

Alice was beginning to get very tired of sitting by her sister on the bank, and of \
having nothing to do: once or twice she had peeped into the book her sister was \
reading, but it had no pictures or conversations in it, "and what is the use of a \
book," thought Alice, "without pictures or conversations?" So she was considering in \
her own mind, as well as she could, for the hot day made her feel very sleepy and \
stupid, whether the pleasure of making a daisy-chain would be worth the trouble of \
getting up and picking the daisies, when suddenly a White Rabbit with pink eyes ran \
close by her. There was nothing so very remarkable in that; nor did Alice think it \
so very much out of the way to hear the Rabbit say to itself, "Oh dear! Oh dear! I \
shall be late!" But when the Rabbit actually took a watch out of its \
waistcoat-pocket, and looked at it, and then hurried on, Alice started to her feet, \
for it flashed across her mind that she had never before seen a rabbit with either a \
waistcoat-pocket, or a watch to take out of it, and burning with curiosity, she ran \
across the field after it, and was just in time to see it pop down a large \
rabbit-hole under the hedge.
"""
